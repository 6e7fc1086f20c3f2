"""Whom a supervisor has to talk to: what all three kinds can do is described in `mpi_world`."""

from gradsplit.launch.lone_world import LoneWorld
from gradsplit.launch.mpi_world import MpiWorld
from gradsplit.launch.slurm_world import SlurmWorld

World = LoneWorld | MpiWorld | SlurmWorld
