#!/bin/bash
# Slurm whose srun does not know the MPI that you use: its own mpirun finds the nodes of the allocation. From the
# repository:
#   sbatch examples/multi_node/slurm_mpirun.sh [options of the launcher]
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
set -euo pipefail
mpirun --map-by ppr:1:node --bind-to none \
    python -m gradsplit.launch --nproc-per-node "${PROCESSES:-gpu}" --log-dir logs "$@" examples/multi_node/train.py
