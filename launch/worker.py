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
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path

from gradsplit.launch import job_record
from gradsplit.launch.devices import bound_to_one_device, list_gpus
from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, RankLostError, let_rank_0_print
from gradsplit.launch.failure import Failure, report
from gradsplit.launch.job_record import JobOutcome, JobRecord
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.mpi_variables import mpi_rank
from gradsplit.launch.mpi_world import join_world
from gradsplit.launch.numa_binding import processors_near
from gradsplit.launch.parent_death import end_with_parent
from gradsplit.launch.preflight import machine_facts, preflight_table
from gradsplit.launch.process_keeper import ProcessKeeper
from gradsplit.launch.rank_environment import (
    SPEC_VARIABLE,
    inherited_environment,
    prepare_ranks,
    torchrun_variables,
)
from gradsplit.launch.rank_output import RankOutput
from gradsplit.launch.rank_placement import RankPlacement, check_placement, place_ranks
from gradsplit.launch.received_signals import ReceivedSignals
from gradsplit.launch.rendezvous import Rendezvous, choose_rendezvous
from gradsplit.launch.slurm_world import join_slurm_world
from gradsplit.launch.supervision import EndedBySignalError, Supervision
from gradsplit.launch.world import World


def main() -> int:
    """Be one of the ranks that the launcher has had ``mpiexec`` start; return the rank's exit code."""
    end_with_parent(os.getppid(), signal.SIGTERM)
    spec = LaunchSpec.from_json(os.environ[SPEC_VARIABLE])
    rank = mpi_rank(os.environ)
    folder = Path(os.environ[job_record.VARIABLE])
    record = None
    if folder.is_dir():  # Not on another machine than the launcher.
        record = JobRecord(folder)
    try:
        exit_code = run_rank(spec, record)
    except LaunchError as error:
        if rank == 0:
            _end(record, USAGE_EXIT_CODE, f"launch: {error}")
        let_rank_0_print(rank)
        exit_code = USAGE_EXIT_CODE
    if record is not None:
        record.note_leaving(rank)
    # A code other than 0 would have mpiexec add its own account, and come last.
    return exit_code if rank == 0 and record is None else 0


def run_rank(spec: LaunchSpec, record: JobRecord | None = None) -> int:
    """Run the user's program on this rank of MPI, or task of Slurm, and return the job's exit code, the same on all.

    ``record``: that of the launcher which started ``mpiexec``; then that one prints what comes last.
    """
    join = join_slurm_world if mpi_rank(os.environ) is None else join_world
    return run_supervisor(spec, None, join, record)


def run_supervisor(
    spec: LaunchSpec,
    processes: int | None,
    join: Callable[[], World],
    record: JobRecord | None = None,
) -> int:
    """Run the user's program here, and return the job's exit code, the same everywhere.

    ``processes``: how many; None leaves it to how many supervisors a node has. ``join``: returns the world of all
    supervisors. The code is 0, or that of the process that failed first, on which rank 0 reports on standard error.
    Raises `LaunchError`, on every rank, when the job cannot start; then no process has been started. It takes over the
    process's signal handlers.
    """
    environment = dict(os.environ)  # Before variables for MPI are added.
    rank = mpi_rank(environment)

    def note_leaving() -> None:
        if record is not None:
            record.note_leaving(rank)

    def note_gone() -> None:
        if record is not None:
            record.note_gone(rank)

    keeper = ProcessKeeper(spec.ending_signals, note_gone)
    signals = ReceivedSignals(frozenset(spec.ending_signals), note_leaving)
    if record is not None:
        record.enter(rank)
    world = None
    placements: list[RankPlacement] = []
    try:
        world = join()
        placements = _place_and_check(spec, world, processes)
        rendezvous = _meet(spec, world, placements)
        if spec.dry_run:
            if world.rank == 0:
                show_plan(spec, placements, rendezvous)
                _end(record, 0)
            world.leave()
            return 0
        bound = len(placements) == world.size and bound_to_one_device(world, placements, environment)
        if bound and world.rank == 0 and placements[0].local_world_size > 1:
            print(
                "launch: each process sees its own device alone: LOCAL_RANK is 0 for all",
                file=sys.stderr,
                flush=True,
            )
        if spec.preflight and placements[0].node_count > 1:
            _compare_machines(spec, world, placements, environment, bound)
        with _job_folder(spec, rendezvous) as folder:
            supervision = Supervision(spec, world, keeper, signals)
            code = _run_attempts(
                spec, world, placements, rendezvous, supervision, folder, environment, record, bound
            )
        world.leave()
        return code
    except EndedBySignalError as ended:
        if world is not None and world.size > 1:
            keeper.close()
            world.leave_after_signal(ended.exit_code)
            os._exit(ended.exit_code)
        return ended.exit_code
    except RankLostError as lost:
        who = f"the launcher's rank {lost.rank}"
        if placements and world is not None:
            place = placements[lost.rank * len(placements) // world.size]
            who = f"{place.hostname}, where rank {place.rank} is,"
        if lost.message and (record is not None or lost.found_here):
            _end(record, lost.exit_code, f"launch: {lost.message.format(who)}; the other ranks were ended")
        note_leaving()
        keeper.close()
        os._exit(lost.exit_code)  # Leaving MPI would wait for the lost rank.
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
    world: World,
    placements: Sequence[RankPlacement],
    rendezvous: Rendezvous,
    supervision: Supervision,
    folder: Path,
    environment: Mapping[str, str],
    record: JobRecord | None,
    bound: bool,
) -> int:
    def note(failure: Failure) -> None:
        if record is not None:
            text = report(failure, placements[failure.rank])
            record.note_failure(world.rank, JobOutcome(failure.time_s, failure.exit_code, text))

    processes = len(placements) // world.size
    own = placements[world.rank * processes :][:processes]
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    inherited = inherited_environment(environment, own[0].local_world_size)
    near: dict[RankPlacement, list[int]] = {}

    def bind_ranks() -> None:
        gpus = list_gpus()
        for place in own:
            near[place] = processors_near(
                str(spec.numa_binding), gpus, devices, 0 if bound else place.local_rank
            )

    if spec.numa_binding is not None:
        _agree(world, bind_ranks)
    for attempt in range(spec.max_restarts + 1):
        if attempt:
            rendezvous = _meet(spec, world, placements, rendezvous.run_id)
        files = {placement: folder / f"attempt_{attempt}" / str(placement.rank) for placement in own}
        _agree(world, partial(prepare_ranks, spec, files, devices, bound))
        output = RankOutput(spec)
        for placement in own:
            variables = torchrun_variables(spec, placement, rendezvous, attempt, devices, bound)
            variables["TORCHELASTIC_ERROR_FILE"] = str(files[placement] / "error.json")
            streams = output.open_streams(placement, files[placement])
            supervision.start(
                placement.rank, spec.command(), inherited | variables, *streams, near.get(placement, ())
            )
        output.start()
        if record is not None:
            record.note_failure(world.rank, None)
        first = supervision.run(output, note)
        code = 0 if first is None else first.exit_code
        message = "" if first is None else report(first, placements[first.rank])
        if first is not None and attempt < spec.max_restarts:
            if world.rank == 0:
                print(f"{message}; restart {attempt + 1} of {spec.max_restarts}", file=sys.stderr, flush=True)
            continue
        if world.rank == 0:
            _end(record, code, message)
        break
    return code


def _compare_machines(
    spec: LaunchSpec,
    world: World,
    placements: Sequence[RankPlacement],
    environment: Mapping[str, str],
    bound: bool,
) -> None:
    processes = len(placements) // world.size
    own = placements[world.rank * processes]
    facts = machine_facts(spec) if own.local_rank == 0 else None
    gathered = world.gather_everywhere([own.hostname, facts, environment.get("CUDA_VISIBLE_DEVICES")])
    if world.rank == 0:
        machines = {hostname: facts for hostname, facts, _ in gathered if facts is not None}
        visible = [devices for *_, devices in gathered for _ in range(processes)]
        print(preflight_table(placements, machines, visible, bound=bound), file=sys.stderr, flush=True)


def _end(record: JobRecord | None, exit_code: int, message: str = "") -> None:
    """Called by rank 0 when it knows how the job ends, and before anybody leaves MPI: that may fail."""
    if record is not None:
        record.note_end(JobOutcome(time.time(), exit_code, message))
    elif message:
        print(message, file=sys.stderr, flush=True)


def _meet(
    spec: LaunchSpec,
    world: World,
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


def _agree(world: World, check: Callable[[], object]) -> None:
    """Do ``check`` on all supervisors; raise `LaunchError` on all of them when it does so on any."""
    problem = None
    try:
        check()
    except LaunchError as error:
        problem = str(error)
    for rank, found in enumerate(world.gather_everywhere(problem)):
        if found is not None:
            raise LaunchError(found if world.size == 1 else f"on the node of rank {rank}: {found}")


def _place_and_check(spec: LaunchSpec, world: World, processes: int | None) -> list[RankPlacement]:
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
