#!/bin/bash
# PBS with HPE's PALS (Polaris, Aurora): its mpiexec starts one launcher on each node. From the repository:
#   qsub examples/multi_node/pals.sh
#PBS -l select=2
#PBS -l walltime=01:00:00
#PBS -l place=scatter
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
mpiexec -n "$nodes" --ppn 1 --cpu-bind none \
    python -m gradsplit.launch --nproc-per-node "${PROCESSES:-gpu}" --log-dir logs "$@" examples/multi_node/train.py
