"""The supervisor: one MPI rank, which starts one process of the user's program and watches over it.

Supervisors spend the job asleep, looking up every few milliseconds. When a process fails, its supervisor
announces that to the others; each ends its own process (SIGTERM, then SIGKILL after a grace period), and all
meet at a barrier that no process of the user can keep them from. There they compare notes: the failure that
came first is the job's. An abort of the MPI job would be shorter, but kills without a grace period, cannot
tell the first failure from those that it caused in other ranks, and has ``mpiexec`` print a banner of its
own.
"""

import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import astuple, dataclass
from pathlib import Path
from types import FrameType

from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, let_rank_0_tell
from gradsplit.launch.held_process import HeldProcess
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.mpi_variables import mpi_rank, without_mpi_variables
from gradsplit.launch.mpi_world import MpiWorld, join_world
from gradsplit.launch.parent_death import end_with_parent
from gradsplit.launch.rank_placement import RankPlacement, check_placement, place_ranks
from gradsplit.launch.rendezvous import Rendezvous, choose_rendezvous

SPEC_VARIABLE = "GRADSPLIT_LAUNCH_SPEC"
"""Carries the spec (JSON) from the launcher that started ``mpiexec`` to its ranks."""
EXIT_CODE_FILE_VARIABLE = "GRADSPLIT_LAUNCH_EXIT_CODE_FILE"
"""Carries the path of the file in which rank 0 leaves the job's exit code for that launcher."""

POLL_INTERVAL_S = 0.01
FAILURE_GRACE_S = 5.0
"""How long a healthy process has to end after SIGTERM when another rank has failed."""
SIGNAL_GRACE_S = 0.15
"""The same when we are told to end: Open MPI follows its SIGTERM with SIGKILL after 0.25 s."""


@dataclass(frozen=True, order=True)
class Failure:
    """A process that did not exit with 0; ordered by when its supervisor saw that (its node's clock)."""

    time_s: float
    rank: int
    status: int
    """An exit code, or -N for signal N."""

    @property
    def exit_code(self) -> int:
        """The exit code that tells of it, in the shells' convention: 128+N for signal N."""
        return self.status if self.status >= 0 else 128 - self.status


def main() -> int:
    """Be one of the ranks that the launcher has had ``mpiexec`` start; return the rank's exit code."""
    end_with_parent(os.getppid(), signal.SIGTERM)
    spec = LaunchSpec.from_json(os.environ[SPEC_VARIABLE])
    rank = mpi_rank(os.environ)
    exit_code_file = Path(os.environ[EXIT_CODE_FILE_VARIABLE])
    try:
        exit_code = run_rank(spec)
    except LaunchError as error:
        if rank == 0:
            print(f"launch: {error}", file=sys.stderr)
            exit_code_file.write_text(str(USAGE_EXIT_CODE))
        let_rank_0_tell(rank)
        return USAGE_EXIT_CODE
    if rank == 0:
        exit_code_file.write_text(str(exit_code))
    return 0  # The file has said it; a non-zero code would have mpiexec add its own account.


def run_rank(spec: LaunchSpec) -> int:
    """Run the user's program on this MPI rank, and return the job's exit code, the same on every rank.

    0, or the exit code of the process that failed first, which rank 0 reports in one line on standard error.
    Raises `LaunchError`, on every rank, when the job cannot start; then no process has been started.
    """
    process = HeldProcess(spec.command())
    _end_on_signals(process)
    try:
        world = join_world()
    except LaunchError:
        process.cancel()
        raise
    try:
        placements = _place_and_check(spec, world)
        placement = placements[world.rank]
        chosen = astuple(choose_rendezvous(spec, placement)) if world.rank == 0 else None
        rendezvous = Rendezvous(*world.gather_everywhere(chosen)[0])
        environment = process_environment(placement)
        process.release(environment | placement.torchrun_variables() | rendezvous.torchrun_variables())
        first = supervise(world, process)
    except LaunchError:
        process.cancel()
        world.close(announcements_pending=0)
        raise
    except BaseException:
        # A fault of ours: without this, the other ranks would wait for us for ever.
        traceback.print_exc()
        process.stop_now(SIGNAL_GRACE_S)
        world.abort(1)
        raise
    if first is None:
        return 0
    if world.rank == 0:
        print(f"launch: {describe(first, placements[first.rank])}", file=sys.stderr)
    return first.exit_code


def _place_and_check(spec: LaunchSpec, world: MpiWorld) -> list[RankPlacement]:
    """Return all ranks' placements; raise `LaunchError` on all of them when any cannot do its part."""
    hostname = socket.gethostname()
    try:
        check_entry(spec)  # On each node: a script may be missing on one of them.
        problem = None
    except LaunchError as error:
        problem = f"on {hostname}: {error}"
    hostnames, problems = zip(*world.gather_everywhere((hostname, problem)), strict=True)
    for problem in problems:
        if problem is not None:
            raise LaunchError(problem)
    placements = place_ranks(hostnames)
    check_placement(spec, placements)
    return placements


def process_environment(placement: RankPlacement) -> dict[str, str]:
    """Return this process's environment as the user's program shall see it, torchrun's variables aside."""
    environment = without_mpi_variables(os.environ)
    # The last would be left over from an outer torchrun, and be false here.
    for name in (SPEC_VARIABLE, EXIT_CODE_FILE_VARIABLE, "TORCHELASTIC_USE_AGENT_STORE"):
        environment.pop(name, None)
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if placement.local_world_size > 1:
        # As torchrun does: N processes with a thread for every processor each would get in each other's way.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def supervise(world: MpiWorld, process: HeldProcess) -> Failure | None:
    """Wait until the processes of all ranks have ended, and leave MPI.

    Return the first failure of any rank, the same on every rank; None when all exited with 0. Once there is a
    failure, all other processes are ended.
    """
    own: Failure | None = None
    announcements_received = 0
    # Set once this process is being ended because of another rank's failure.
    kill_time_s: float | None = None
    while True:
        if process.status is None:
            status = process.poll()
            if status:
                process.send(signal.SIGKILL)  # To what it had started: nobody else ends that now.
                if kill_time_s is None:
                    own = Failure(time.time(), world.rank, status)
                    world.announce()
        if world.take_announcement():
            announcements_received += 1
            if process.status is None and kill_time_s is None:
                process.send(signal.SIGTERM)
                kill_time_s = time.monotonic() + FAILURE_GRACE_S
        if process.status is not None:
            if world.everyone_is_done():
                break
        elif kill_time_s is not None and time.monotonic() > kill_time_s:
            process.send(signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
    gathered = world.gather_everywhere(None if own is None else astuple(own))
    failures = [Failure(*failure) for failure in gathered if failure is not None]
    from_others = len(failures) - (own is not None)
    world.close(announcements_pending=from_others - announcements_received)
    return min(failures, default=None)


def describe(failure: Failure, placement: RankPlacement) -> str:
    """Return one line on a failed rank: which, where, how it ended."""
    who = f"rank {placement.rank} of {placement.world_size}"
    who += f" (local rank {placement.local_rank} on {placement.hostname})"
    if failure.status >= 0:
        return f"{who} exited with code {failure.status}; the other ranks were ended"
    number = -failure.status
    name = signal.strsignal(number) or "unknown"
    hint = "; often the system's doing when memory runs out" if number == signal.SIGKILL else ""
    return f"{who} was killed by signal {number} ({name}{hint}); the other ranks were ended"


def _end_on_signals(process: HeldProcess) -> None:
    """When this supervisor is told to end, end its process and then itself, whatever it is doing."""

    def end(number: int, _frame: FrameType | None) -> None:
        try:
            process.stop_now(SIGNAL_GRACE_S)
        finally:
            # Somebody ends the whole MPI job; its orderly end is not ours to wait for.
            os._exit(128 + number)

    for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ending, end)
