#!/bin/bash
# Machines that you reach by ssh, one a line in the file hosts; the same Python and files on each of them.
#   bash examples/multi_node/hostfile.sh [options of the launcher]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m gradsplit.launch --hostfile "${HOSTFILE:-hosts}" --nproc-per-node "${PROCESSES:-gpu}" "$@" \
    examples/multi_node/train.py
