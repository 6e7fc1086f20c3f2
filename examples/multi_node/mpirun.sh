#!/bin/bash
# The same with an mpirun of your own: one launcher on each machine, which starts that machine's processes.
#   bash examples/multi_node/mpirun.sh [options of the launcher]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec mpirun --hostfile "${HOSTFILE:-hosts}" --map-by ppr:1:node --bind-to none -x PATH \
    python -m gradsplit.launch --nproc-per-node "${PROCESSES:-gpu}" "$@" examples/multi_node/train.py
