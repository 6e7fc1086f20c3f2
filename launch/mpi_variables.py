"""What ``mpiexec`` says to a process through environment variables, before MPI has been initialised.

Sources: Open MPI's and PMIx's documentation of the variables of launched processes; Hydra (MPICH, Intel MPI)
and Slurm's PMI plug-ins set ``PMI_RANK`` and ``PMI_SIZE``.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from gradsplit.launch.errors import LaunchError

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPIR_")
_NAMES = frozenset({"MPI_LOCALRANKID", "MPI_LOCALNRANKS"})


def mpi_rank(environment: Mapping[str, str]) -> int | None:
    """Return the rank that ``mpiexec`` gave this process; None when no MPI job surrounds it."""
    return _first_number(environment, RANK_VARIABLES)


def mpi_size(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks ``mpiexec`` started; None when unknown."""
    return _first_number(environment, SIZE_VARIABLES)


def on_one_machine(environment: Mapping[str, str]) -> bool:
    """Return whether ``mpiexec`` says that it started all ranks on this machine."""
    size = mpi_size(environment)
    return size is not None and size == _first_number(environment, LOCAL_SIZE_VARIABLES)


def lonely_rank(environment: Mapping[str, str]) -> int | None:
    """Return which rank this is that Flux or PALS started without telling it of the others; None where it is none."""
    if mpi_rank(environment) is not None or environment.get("FLUX_JOB_SIZE") == "1":
        return None
    return _first_number(environment, ("FLUX_TASK_RANK", "PALS_RANKID"))


def refuse_lonely_worlds(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` where each of several processes would be a job of its own, of the same program."""
    if lonely_rank(environment) is not None:
        raise LaunchError(
            "Flux or PALS started this without PMI, so that each process would be a job of its own: leave out "
            "-o pmi=off (flux run) or --pmi=none (mpiexec)"
        )


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm itself is this process's PMIx server, and no ``mpirun`` in an allocation of Slurm."""
    return environment.get("PMIX_NAMESPACE", "").startswith("slurm.")


def allocated_nodes(environment: Mapping[str, str]) -> int:
    """Return how many nodes the scheduler has given to this job, or to the step in which this runs; 1 where unknown."""
    nodes = _first_number(environment, ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "FLUX_JOB_NNODES"))
    if nodes is None and "PBS_NODEFILE" in environment:
        with contextlib.suppress(OSError):
            return len(set(Path(environment["PBS_NODEFILE"]).read_text().split())) or 1
    return nodes or 1


def without_mpi_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the traces of an MPI job; where none surrounds this process, as it is.

    So the user's own settings, such as ``OMPI_MCA_btl``, reach the training process as under torchrun. In a job
    the supervisor *is* the MPI rank. A training process that still carried its identity would confuse libraries that
    look for it, and a second ``MPI_Init`` under the same rank hangs.
    """
    if mpi_rank(environment) is None:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_PREFIXES) and name not in _NAMES
    }


def _first_number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None
