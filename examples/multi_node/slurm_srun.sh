#!/bin/bash
# Slurm by itself, whether or not it knows an MPI. From the repository:
#   sbatch examples/multi_node/slurm_srun.sh [options of the launcher]
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
# Two minutes before the end the processes get SIGUSR1, to write a checkpoint.
#SBATCH --signal=USR1@120
set -euo pipefail
# One launcher on each node starts the node's processes. With --mpi=pmix they meet over MPI instead, which has to be the
# one that mpi4py links with.
srun --mpi=none --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    python -m gradsplit.launch --nproc-per-node "${PROCESSES:-gpu}" --log-dir logs "$@" examples/multi_node/train.py
