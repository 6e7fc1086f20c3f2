"""The supervisor: starts processes of the user's program, and reports on how they ended.

Under MPI each rank is a supervisor with one process; on one machine the launcher itself is the only one, with all.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, let_rank_0_tell
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.lone_world import LoneWorld
from gradsplit.launch.mpi_variables import mpi_rank, without_mpi_variables
from gradsplit.launch.mpi_world import MpiWorld, join_world
from gradsplit.launch.orphan_guard import OrphanGuard
from gradsplit.launch.parent_death import end_with_parent
from gradsplit.launch.rank_output import RankOutput
from gradsplit.launch.rank_placement import RankPlacement, check_placement, place_ranks
from gradsplit.launch.rank_process import RankProcess
from gradsplit.launch.received_signals import ReceivedSignals
from gradsplit.launch.rendezvous import Rendezvous, choose_rendezvous
from gradsplit.launch.supervision import EndedBySignalError, Failure, Supervision

SPEC_VARIABLE = "GRADSPLIT_LAUNCH_SPEC"
"""Carries the spec (JSON) from the launcher that started ``mpiexec`` to its ranks."""
EXIT_CODE_FILE_VARIABLE = "GRADSPLIT_LAUNCH_EXIT_CODE_FILE"
"""Carries the path of the file in which rank 0 leaves the job's exit code for that launcher."""


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
        let_rank_0_tell(rank)
        exit_code = USAGE_EXIT_CODE
    if rank == 0:
        if not exit_code_file.parent.is_dir():  # On another machine than the launcher.
            return exit_code
        exit_code_file.write_text(str(exit_code))
    return 0  # The file has said it; a non-zero code would have mpiexec add its own account.


def run_rank(spec: LaunchSpec) -> int:
    """Run the user's program on this MPI rank, and return the job's exit code, the same on every rank."""
    return run_supervisor(spec, 1, join_world)


def run_supervisor(spec: LaunchSpec, processes: int, join: Callable[[], MpiWorld | LoneWorld]) -> int:
    """Run ``processes`` processes of the user's program here, and return the job's exit code, the same everywhere.

    ``join``: returns the world of all supervisors. The code is 0, or that of the process that failed first, which
    rank 0 reports in one line on standard error. Raises `LaunchError`, on every rank, when the job cannot start; then
    no process has been started. It takes over the process's signal handlers.
    """
    guard = OrphanGuard()
    signals = ReceivedSignals()
    world = None
    try:
        world = join()
        placements = _place_and_check(spec, world, processes)
        own = placements[world.rank * processes :][:processes]
        chosen = astuple(choose_rendezvous(spec, own[0])) if world.rank == 0 else None
        rendezvous = Rendezvous(*world.gather_everywhere(chosen)[0])
        signals.started = True
        output = RankOutput()
        running = {}
        for placement in own:
            variables = placement.torchrun_variables() | rendezvous.torchrun_variables()
            environment = process_environment(placement) | variables
            process = RankProcess(spec.command(), environment, *output.open_streams())
            guard.add(process.group)
            running[placement.rank] = process
        output.start()
        first = Supervision(world, running, guard, signals).run()
        output.finish()
    except EndedBySignalError as ended:
        output.finish()
        guard.close()
        if world is not None and world.size > 1:
            os._exit(ended.exit_code)
        return ended.exit_code
    except LaunchError:
        guard.close()
        if world is not None:
            world.close(announcements_pending=0)
        raise
    except BaseException:
        # A fault of ours: without this, the other ranks would wait for us for ever. The guard ends what has started.
        traceback.print_exc()
        guard.close()
        if world is not None:
            world.abort(1)
        raise
    guard.close()
    if first is None:
        return 0
    if world.rank == 0:
        print(f"launch: {describe(first, placements[first.rank])}", file=sys.stderr)
    return first.exit_code


def _place_and_check(spec: LaunchSpec, world: MpiWorld | LoneWorld, processes: int) -> list[RankPlacement]:
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
    placements = place_ranks([hostname for hostname in hostnames for _ in range(processes)])
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
