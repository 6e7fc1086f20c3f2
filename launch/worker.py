"""The supervisor: starts processes of the user's program, starts them again after a failure, and reports on it.

Under MPI each rank is a supervisor with one process (or, where it is alone on its node and more are asked for, with
several, as under torchrun); on one machine the launcher itself is the only one, with all.
"""

import os
import shlex
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path

from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, let_rank_0_tell
from gradsplit.launch.failure import report
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.lone_world import LoneWorld
from gradsplit.launch.mpi_variables import mpi_rank
from gradsplit.launch.mpi_world import MpiWorld, join_world
from gradsplit.launch.parent_death import end_with_parent
from gradsplit.launch.process_keeper import ProcessKeeper
from gradsplit.launch.rank_environment import (
    EXIT_CODE_FILE_VARIABLE,
    SPEC_VARIABLE,
    inherited_environment,
    prepare_ranks,
    torchrun_variables,
)
from gradsplit.launch.rank_output import RankOutput
from gradsplit.launch.rank_placement import RankPlacement, check_placement, place_ranks
from gradsplit.launch.received_signals import ReceivedSignals
from gradsplit.launch.rendezvous import Rendezvous, choose_rendezvous
from gradsplit.launch.supervision import EndedBySignalError, Supervision


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
    return run_supervisor(spec, None, join_world)


def run_supervisor(spec: LaunchSpec, processes: int | None, join: Callable[[], MpiWorld | LoneWorld]) -> int:
    """Run the user's program here, and return the job's exit code, the same everywhere.

    ``processes``: how many; None leaves it to how many supervisors a node has. ``join``: returns the world of all
    supervisors. The code is 0, or that of the process that failed first, on which rank 0 reports on standard error.
    Raises `LaunchError`, on every rank, when the job cannot start; then no process has been started. It takes over the
    process's signal handlers.
    """
    environment = dict(os.environ)  # Before MPI is told how to go about it.
    keeper = ProcessKeeper()
    signals = ReceivedSignals(frozenset(spec.ending_signals))
    world = None
    try:
        world = join()
        placements = _place_and_check(spec, world, processes)
        rendezvous = _meet(spec, world, placements)
        if spec.dry_run:
            if world.rank == 0:
                show_plan(spec, placements, rendezvous)
            world.leave()
            return 0
        with _job_folder(spec, rendezvous) as folder:
            supervision = Supervision(spec, world, keeper, signals)
            code = _run_attempts(spec, world, placements, rendezvous, supervision, folder, environment)
        world.leave()
        return code
    except EndedBySignalError as ended:
        if world is not None and world.size > 1:
            keeper.close()
            os._exit(ended.exit_code)
        return ended.exit_code
    except LaunchError:
        if world is not None:
            world.leave()
        raise
    except BaseException:
        # A fault of ours: without this, the other ranks would wait for us for ever. The keeper ends what it started.
        traceback.print_exc()
        if world is not None and world.size > 1:
            keeper.close()
            world.abort(1)
        raise
    finally:
        keeper.close()


def _run_attempts(
    spec: LaunchSpec,
    world: MpiWorld | LoneWorld,
    placements: Sequence[RankPlacement],
    rendezvous: Rendezvous,
    supervision: Supervision,
    folder: Path,
    environment: Mapping[str, str],
) -> int:
    processes = len(placements) // world.size
    own = placements[world.rank * processes :][:processes]
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    inherited = inherited_environment(environment, own[0].local_world_size)
    for attempt in range(spec.max_restarts + 1):
        if attempt:
            rendezvous = _meet(spec, world, placements, rendezvous.run_id)
        files = {placement: folder / f"attempt_{attempt}" / str(placement.rank) for placement in own}
        _agree(world, partial(prepare_ranks, spec, files, devices))
        output = RankOutput(spec)
        for placement in own:
            variables = torchrun_variables(spec, placement, rendezvous, attempt, devices)
            variables["TORCHELASTIC_ERROR_FILE"] = str(files[placement] / "error.json")
            streams = output.open_streams(placement, files[placement])
            supervision.start(placement.rank, spec.command(), inherited | variables, *streams)
        output.start()
        first = supervision.run(output)
        if first is None:
            return 0
        if world.rank == 0:
            report(first, placements[first.rank], attempt, spec.max_restarts)
    return first.exit_code


def _meet(
    spec: LaunchSpec,
    world: MpiWorld | LoneWorld,
    placements: Sequence[RankPlacement],
    run_id: str | None = None,
) -> Rendezvous:
    chosen = astuple(choose_rendezvous(spec, placements[0], run_id)) if world.rank == 0 else None
    return Rendezvous(*world.gather_everywhere(chosen)[0])


@contextmanager
def _job_folder(spec: LaunchSpec, rendezvous: Rendezvous) -> Iterator[Path]:
    """A folder for this job's files; gone afterwards unless the user wants logs."""
    if spec.log_folder is not None:
        yield Path(spec.log_folder).absolute() / rendezvous.log_name
    elif spec.redirected != "0" or spec.teed != "0":
        yield Path(tempfile.mkdtemp(prefix="launch-logs-"))
    else:
        with tempfile.TemporaryDirectory(prefix="launch-") as folder:
            yield Path(folder)


def _agree(world: MpiWorld | LoneWorld, check: Callable[[], object]) -> None:
    """Do ``check`` on all supervisors; raise `LaunchError` on all of them when it does so on any."""
    problem = None
    try:
        check()
    except LaunchError as error:
        problem = str(error)
    for rank, told in enumerate(world.gather_everywhere(problem)):
        if told is not None:
            raise LaunchError(told if world.size == 1 else f"on the node of rank {rank}: {told}")


def _place_and_check(
    spec: LaunchSpec, world: MpiWorld | LoneWorld, processes: int | None
) -> list[RankPlacement]:
    """Return all ranks' placements; raise `LaunchError` on all of them when any cannot do its part."""
    _agree(world, partial(check_entry, spec))  # On each node: a script may be missing on one of them.
    hostnames = world.gather_everywhere(socket.gethostname())
    if processes is None:
        alone = max(Counter(hostnames).values()) == 1
        processes = (spec.processes_per_node or 1) if alone else 1
    placements = place_ranks([hostname for hostname in hostnames for _ in range(processes)])
    check_placement(spec, placements)
    if world.rank == 0 and spec.nodes is not None and spec.nodes[0] != spec.nodes[1]:
        low, high = spec.nodes
        print(f"launch: --nnodes {low}:{high}: {placements[0].node_count} for the whole job", file=sys.stderr)
    return placements


def show_plan(spec: LaunchSpec, placements: Sequence[RankPlacement], rendezvous: Rendezvous) -> None:
    """Print what would be started."""
    for placement in placements:
        print(f"rank {placement.rank} on {placement.hostname}:")
        for name, value in torchrun_variables(spec, placement, rendezvous, 0, None).items():
            print(f"  {name}={shlex.quote(value)}")
    print(f"each: {shlex.join(spec.command())}")
