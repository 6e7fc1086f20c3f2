"""What ``srun`` says to a task of its step through environment variables, where no MPI does.

Source: srun's manual page, "Output environment variables". Every task of a step finds out the same from them: where its
first task is to be found, and at which ports.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gradsplit.launch.errors import LaunchError
from gradsplit.launch.mpi_variables import mpi_rank

_FIRST_PORT, _PORTS = 61000, 4500
"""Above those that Linux hands out by itself, so that as a rule nobody has them."""
_TRIED_PORTS = 8


@dataclass(frozen=True)
class SlurmTask:
    """One of several tasks of a step."""

    step: str
    """Job and step: 7.0."""
    rank: int
    size: int
    node_count: int
    first_host: str
    """Where rank 0 is."""

    def ports(self) -> list[int]:
        """Return at which ports rank 0 may listen, in its order of preference."""
        names = (f"gradsplit.launch {self.step} {attempt}" for attempt in range(_TRIED_PORTS))
        digests = (hashlib.sha256(name.encode()).digest() for name in names)
        return [_FIRST_PORT + int.from_bytes(digest[:4]) % _PORTS for digest in digests]


def slurm_rank(environment: Mapping[str, str]) -> int | None:
    """Return which of several tasks this is that ``srun`` started without MPI; None when it is none of those."""
    if mpi_rank(environment) is not None or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    rank = environment.get("SLURM_PROCID", "")
    return int(rank) if rank.isdigit() else None


def slurm_task(environment: Mapping[str, str]) -> SlurmTask:
    """Return the task that this is, which `slurm_rank` says it is. Raises `LaunchError` where variables contradict.

    For a task that takes itself for the only one would be a job of its own, of the same program.
    """
    said = {name: environment.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")}
    sizes = {size for size in said.values() if size}
    if len(sizes) > 1:
        shown = ", ".join(f"{name}={size}" for name, size in said.items() if size)
        raise LaunchError(
            f"srun's variables disagree on how many tasks there are: {shown}; start one step with srun -n"
        )
    rank, size = int(environment["SLURM_PROCID"]), int(sizes.pop())
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise LaunchError("a step of several components (srun ... : ...) needs MPI here: srun --mpi=pmix")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if not nodes or rank >= size:
        raise LaunchError(
            f"srun's variables are incomplete: SLURM_PROCID={rank} of {size}, SLURM_STEP_NODELIST={nodes!r}",
            known_here_alone=True,
        )
    if rank == 0 and environment.get("SLURM_NODEID", "0") != "0":
        raise LaunchError(
            "task 0 is not on the first node of the step (srun --distribution); use srun --mpi=pmix"
        )
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    count = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "")
    return SlurmTask(step, rank, size, int(count) if count.isdigit() else 2, first_of(nodes))


def first_of(nodes: str) -> str:
    """Return the first name of a list in Slurm's spelling: a3 of ``a[3-5,9],b``."""
    first, inside = "", False
    for position, character in enumerate(nodes):
        if character == "[":
            inside = True
            first += nodes[position + 1 :].partition("]")[0].partition(",")[0].partition("-")[0]
        elif character == "]":
            inside = False
        elif not inside and character == ",":
            break
        elif not inside:
            first += character
    return first
