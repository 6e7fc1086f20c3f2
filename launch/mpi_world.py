"""MPI as the supervisors use it; the one place that imports mpi4py.

Blocking MPI calls spin on a processor that a training process needs. They are used at the start only, and at
the very end when every rank is known to be there; in between there are calls that return at once.
"""

import os
from typing import Any

from launch.errors import LaunchError
from launch.mpi_environment import find_running_library
from launch.mpi_variables import mpi_size


class MpiWorld:
    """All ranks of the MPI job, seen from one. Create it with `join_world`."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._ranks = mpi.COMM_WORLD
        self._barrier: Any = None
        self._sends: list[Any] = []
        self.rank: int = self._ranks.Get_rank()
        self.size: int = self._ranks.Get_size()

    def gather_everywhere(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in order of rank. Blocks until all ranks call it."""
        return self._ranks.allgather(value)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value``. Blocks until rank 0 has called it."""
        return self._ranks.bcast(value, root=0)

    def announce(self, value: Any) -> None:
        """Send ``value`` to every other rank, without waiting. At most once a rank."""
        others = (other for other in range(self.size) if other != self.rank)
        self._sends = [self._ranks.isend(value, dest=other) for other in others]

    def next_announcement(self) -> Any | None:
        """Return an announcement that has arrived; None when there is none."""
        if not self._ranks.iprobe(source=self._mpi.ANY_SOURCE):
            return None
        return self._ranks.recv(source=self._mpi.ANY_SOURCE)

    def everyone_is_done(self) -> bool:
        """Say that this rank is done, and return whether every rank has said so. Called again until true."""
        if self._barrier is None:
            self._barrier = self._ranks.Ibarrier()
        return self._barrier.Test()

    def close(self, announcements_pending: int) -> None:
        """Leave MPI in good order, once `everyone_is_done`.

        ``announcements_pending``: how many announcements to this rank `next_announcement` has not returned
        yet.
        """
        for _ in range(announcements_pending):
            self._ranks.recv(source=self._mpi.ANY_SOURCE)
        self._mpi.Request.waitall(self._sends)
        self._mpi.Finalize()

    def abort(self, exit_code: int) -> None:
        """End all ranks now. For a fault of the launcher itself."""
        self._ranks.Abort(exit_code)


def join_world() -> MpiWorld:
    """Initialise MPI in this process and return its world.

    Raises `LaunchError` when mpi4py is missing or finds no library, and when its library is not that of the
    ``mpiexec`` which started this process.
    """
    library = None if "MPI4PY_LIBMPI" in os.environ else find_running_library(os.environ)
    if library is not None:
        os.environ["MPI4PY_LIBMPI"] = str(library)
    # Supervisors hold no tensors; without this Open MPI looks for GPUs and may claim memory on them.
    os.environ.setdefault("OMPI_MCA_accelerator", "null")
    try:
        # Imported here, not above: importing mpi4py.MPI loads the library, which must be chosen first, and
        # which the process that only starts mpiexec has no use for.
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"MPI cannot be loaded ({reason}); check mpi4py and MPI4PY_LIBMPI") from error
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    world = MpiWorld(MPI)
    started = mpi_size(os.environ)
    if started not in (None, world.size):
        name = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        raise LaunchError(
            f"mpiexec started {started} ranks, but mpi4py's library ({name}) sees {world.size}: they belong "
            "to different MPIs; set MPI4PY_LIBMPI to the libmpi of that mpiexec"
        )
    return world
