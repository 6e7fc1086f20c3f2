"""MPI as the supervisors use it; the one place that imports mpi4py.

Blocking MPI calls spin on a processor that a training process needs, and wait for ever for a rank that has gone. They
are used to join and to leave only; in between there are calls that return at once.

Messages are JSON and never pickles: who sends one to a rank cannot have it run anything.
"""

import faulthandler
import json
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from gradsplit.launch.errors import LaunchError, RankLostError, silent_for
from gradsplit.launch.mpi_environment import find_running_library
from gradsplit.launch.mpi_variables import mpi_size, on_one_machine, started_by_srun

_SHARED_MEMORY_ALONE = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^tcp,ofi,uct,openib,usnic",
    "UCX_TLS": "self,sm",  # MPICH's two ways to a network.
    "FI_TCP_IFACE": "lo",
    "FI_SOCKETS_IFACE": "lo",
}
"""With these an MPI library talks within one machine, and none of its ranks listens on a network."""
_ANNOUNCEMENT, _HEARTBEAT, _LOSS = range(3)
"""Kinds of messages."""
_GRACE_S, _GRACE_OF_SLURM_S = 0.15, 30.0
"""From a signal to the end: Open MPI's ``mpirun`` follows its SIGTERM with SIGKILL after 0.25 s."""
_HEARTBEAT_S = 5.0
_LOOK_S = 0.2
JOIN_S = 600.0
"""As torchrun's: how long a rank waits for the others to come."""
SILENCE_S = 60.0
"""After so long without a heartbeat a rank is lost."""


class MpiWorld:
    """All ranks of the MPI job, seen from one. Create it with `join_world`.

    Neither Open MPI nor MPICH notices in time that a machine has gone whose connections nobody closed. So each rank
    sends a heartbeat to the next one, and misses those of the one before. Whatever waits may raise `RankLostError`.
    """

    def __init__(self, mpi: Any, signal_grace_s: float) -> None:
        self.signal_grace_s = signal_grace_s
        """How long processes have to end after a signal."""
        self._mpi = mpi
        self._ranks = mpi.COMM_WORLD
        self._barrier: Any = None
        self._sends: list[Any] = []
        self.rank: int = self._ranks.Get_rank()
        self.size: int = self._ranks.Get_size()
        self._before = (self.rank - 1) % self.size
        self._heartbeats: list[Any] = []
        self._sent = self._heard = 0
        self._looked_s = self._beat_s = time.monotonic()
        self._silence_s = 0.0

    def gather_everywhere(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` as JSON knows it, in order of rank. Blocks until all ranks call it."""
        sent = json.dumps(value).encode()
        sizes = array("i", [0] * self.size)
        self._wait(self._ranks.Iallgather(array("i", [len(sent)]), sizes))
        received = bytearray(sum(sizes))
        self._wait(self._ranks.Iallgatherv(sent, [received, list(sizes), self._mpi.BYTE]))
        ends = accumulate(sizes)
        return [json.loads(received[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def announce(self) -> None:
        """Send an empty message to every other rank, without waiting. At most once a rank until all `settle`."""
        others = (other for other in range(self.size) if other != self.rank)
        self._sends = [self._ranks.Isend(b"", dest=other, tag=_ANNOUNCEMENT) for other in others]

    def take_announcement(self) -> bool:
        """Return whether another rank's announcement has arrived, each once."""
        return self._take(self._mpi.ANY_SOURCE, _ANNOUNCEMENT) is not None

    def beat(self) -> None:
        """Send and hear heartbeats. Called again and again while anything is waited for. Raises `RankLostError`."""
        now_s = time.monotonic()
        looked_s = now_s - self._looked_s
        if looked_s < _LOOK_S or self.size == 1:
            return
        self._looked_s = now_s
        self._silence_s += min(looked_s, 2 * _LOOK_S)  # Who has not run meanwhile has not listened either.
        if now_s - self._beat_s >= _HEARTBEAT_S:
            self._beat_s = now_s
            self._sent += 1
            self._heartbeats = [send for send in self._heartbeats if not send.Test()]
            self._heartbeats.append(self._ranks.Isend(b"", dest=(self.rank + 1) % self.size, tag=_HEARTBEAT))
        while self._take(self._before, _HEARTBEAT) is not None:
            self._heard += 1
            self._silence_s = 0.0
        lost = self._take(self._mpi.ANY_SOURCE, _LOSS)
        if lost is not None:
            raise RankLostError(int.from_bytes(lost), silent_for(SILENCE_S))
        if self._silence_s > SILENCE_S:
            for other in set(range(self.size)) - {self.rank, self._before}:
                self._heartbeats.append(self._ranks.Isend(self._before.to_bytes(4), dest=other, tag=_LOSS))
            raise RankLostError(self._before, silent_for(SILENCE_S), found_here=True)

    def _take(self, source: int, tag: int) -> bytes | None:
        """Return a message that has arrived; None without one."""
        status = self._mpi.Status()
        message = self._ranks.Improbe(source=source, tag=tag, status=status)
        if message is None:
            return None
        received = bytearray(status.Get_count())
        # That one: MPICH never ends a receive from any source, of another machine's message.
        message.Recv(received)
        return bytes(received)

    def _wait(self, request: Any) -> None:
        while not request.Test():
            self.beat()
            time.sleep(0.001)

    def everyone_is_done(self) -> bool:
        """Say that this rank is done, and return whether every rank has said so. Called again until true."""
        if self._barrier is None:
            self._barrier = self._ranks.Ibarrier()
        return self._barrier.Test()

    def settle(self, announcements_pending: int) -> None:
        """Be ready for the next announcement, once `everyone_is_done`.

        ``announcements_pending``: how many announcements to this rank `take_announcement` has not taken yet.
        """
        for _ in range(announcements_pending):
            while not self.take_announcement():
                self.beat()
        for send in self._sends:
            self._wait(send)
        self._sends = []
        self._barrier = None

    def leave(self) -> None:
        """Leave MPI in good order, as all ranks do: with no message under way."""
        self._beat_s = float("inf")
        with _ended_after(SILENCE_S):
            sent = self.gather_everywhere(self._sent)[self._before]
            while self._heard < sent:
                if self._take(self._before, _HEARTBEAT) is not None:
                    self._heard += 1
            self._mpi.Finalize()

    def leave_after_signal(self, exit_code: int) -> None:
        """A signal has ended this rank: ``mpiexec`` ends the others."""

    def abort(self, exit_code: int) -> None:
        """End all ranks now. For a fault of the launcher itself."""
        self._ranks.Abort(exit_code)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End this process, with a traceback, when the block takes longer: it calls MPI, which waits for ever for a rank
    that does not come, or has gone, and lets no other thread of Python run meanwhile.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


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
    # Its library aborts the job when another supervisor's connections end. First mpiexec is to find out that one has
    # died: aborts of several ranks in the midst of that have been seen to bring it to a standstill.
    os.environ.setdefault("OMPI_MCA_mpi_abort_delay", "1")
    if on_one_machine(os.environ):
        for name, value in _SHARED_MEMORY_ALONE.items():
            os.environ.setdefault(name, value)
    try:
        # Imported here, not above: importing mpi4py.MPI loads the library, which must be chosen first, and
        # which the process that only starts mpiexec has no use for.
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"MPI cannot be loaded ({reason}); check mpi4py and MPI4PY_LIBMPI") from error
    with _ended_after(JOIN_S):
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    world = MpiWorld(MPI, _GRACE_OF_SLURM_S if started_by_srun(os.environ) else _GRACE_S)
    started = mpi_size(os.environ)
    if started not in (None, world.size):
        name = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        by, mend = "mpiexec", "set MPI4PY_LIBMPI to the libmpi of that mpiexec, or build mpi4py with it"
        if "SLURM_STEP_ID" in os.environ:
            by, mend = "srun", "use srun --mpi=none, which needs no MPI, or --mpi=pmix for Open MPI"
        raise LaunchError(
            f"{by} started {started} ranks, but mpi4py's library ({name}) sees {world.size}: they belong to different "
            f"MPIs; {mend}"
        )
    return world
