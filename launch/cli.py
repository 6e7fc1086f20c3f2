"""From the command line to the job."""

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, let_rank_0_print
from gradsplit.launch.job import run_job
from gradsplit.launch.launch_spec import DEFAULT_SIGNALS, EntryKind, LaunchSpec
from gradsplit.launch.mpi_environment import find_mpi
from gradsplit.launch.mpi_variables import lonely_rank, mpi_rank, refuse_lonely_worlds
from gradsplit.launch.numa_binding import MODES
from gradsplit.launch.options import parse_options, told_without_effect
from gradsplit.launch.process_count import count_devices, parse_process_count
from gradsplit.launch.rank_output import streams_of
from gradsplit.launch.slurm_task import slurm_rank
from gradsplit.launch.worker import run_rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: those of the process) and return its exit code.

    Errors of the command line are one line on standard error and exit code 2; when ``mpiexec`` or ``srun`` runs
    this on several ranks, rank 0 alone prints it.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    rank = mpi_rank(os.environ)
    if rank is None:
        rank = slurm_rank(os.environ)
    if list(arguments[:1]) == ["doctor"]:
        arguments = _of_doctor(arguments[1:], rank)
    exit_code = _run(arguments, rank)
    if exit_code:
        let_rank_0_print(rank)
    return exit_code


def _of_doctor(options: Sequence[str], rank: int | None) -> list[str]:
    """Return the arguments that start the doctor, after saying which MPI would start ranks on several machines."""
    if rank is None:
        try:
            mpi = find_mpi(os.environ)
            print(
                f"MPI: {mpi.flavour}, {mpi.mpiexec}, {mpi.library or 'its library is not in a usual place'}"
            )
        except LaunchError as error:
            print(f"MPI: {error}")
        if importlib.util.find_spec("mpi4py") is None:
            print("MPI: mpi4py is not installed; pip install mpi4py")
        sys.stdout.flush()
        options = ["--nproc-per-node", str(count_devices("cuda") or 2), *options]
    return [*options, "-m", "gradsplit.distributed.doctor"]


def _run(arguments: Sequence[str], rank: int | None) -> int:
    try:
        options = parse_options(list(arguments))
        spec = spec_of(options)
        note = told_without_effect(options)
        if note is not None and not rank:
            print(f"launch: {note}", file=sys.stderr)
        if rank is not None:
            return run_rank(spec)
        refuse_lonely_worlds(os.environ)
        check_entry(spec)  # Ranks do it together, each on its own node.
        return run_job(spec)
    except LaunchError as error:
        if not (lonely_rank(os.environ) if rank is None else rank) or error.known_here_alone:
            print(f"launch: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE


def spec_of(options: argparse.Namespace) -> LaunchSpec:
    """Return the launch that ``options`` (from `parse_options`) describe."""
    if options.module and options.no_python:
        raise LaunchError("--module and --no-python exclude each other: a module is run by Python")
    kind = EntryKind.SCRIPT
    if options.module:
        kind = EntryKind.MODULE
    elif options.no_python and not options.run_path:
        kind = EntryKind.PROGRAM
    if not options.command:
        raise LaunchError(f"no {kind} given; expected: [options] {kind} [arguments]")
    address = options.master_addr
    if address is not None and not address.strip():
        raise LaunchError("--master-addr is empty; allowed: a host name or IP address of rank 0's node")
    processes = options.nproc_per_node
    for streams in filter(None, (options.redirects, options.tee)):
        streams_of(streams, 0)  # A fault is reported at once.
    timeout = options.shutdown_timeout or os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return LaunchSpec(
        entry=options.command[0],
        entry_kind=kind,
        arguments=tuple(options.command[1:]),
        processes_per_node=None if processes is None else parse_process_count(processes),
        nodes=_nodes(options),
        master_address=address or options.local_addr,
        master_port=_number("--master-port", options.master_port, 1, 65535),
        hostfile=options.hostfile,
        mpi_arguments=None if options.mpi_args is None else tuple(shlex.split(options.mpi_args)),
        bind_to=options.bind or "none",
        run_id=options.rdzv_id,
        max_restarts=_number("--max-restarts", options.max_restarts, 0) or 0,
        role=options.role or "default",
        log_folder=options.log_dir,
        redirected=options.redirects or "0",
        teed=options.tee or "0",
        shown_local_ranks=_ranks("--local-ranks-filter", options.local_ranks_filter),
        shown_ranks=_ranks("--ranks-filter", options.ranks_filter),
        ending_signals=_signals(options.signals_to_handle),
        shutdown_timeout_s=_number("--shutdown-timeout", timeout, 0),
        virtual_local_rank=options.virtual_local_rank,
        dry_run=options.dry_run,
        preflight=not options.no_preflight,
        numa_binding=_numa_mode(options.numa_binding),
        filters=(_words(options.duplicate_stdout_filters), _words(options.duplicate_stderr_filters)),
    )


def _nodes(options: argparse.Namespace) -> tuple[int, int] | None:
    text = options.nnodes
    if text is None:
        return (1, 1) if options.standalone else None
    low, colon, high = text.partition(":")
    bounds = (low, high if colon else low)
    if not all(bound.isascii() and bound.isdigit() for bound in bounds) or not 0 < int(low) <= int(bounds[1]):
        raise LaunchError(f"--nnodes {text!r}: allowed: a whole number from 1, or a range of them: 1:4")
    if options.standalone and int(low) != 1:
        raise LaunchError(f"--standalone means --nnodes 1, got --nnodes {text}")
    return int(low), int(bounds[1])


def _number(option: str, text: str | None, least: int, most: int | None = None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text) and (most is None or int(text) <= most)):
        up_to = "" if most is None else f" to {most}"
        raise LaunchError(f"{option} {text!r}: allowed: a whole number from {least}{up_to}")
    return int(text)


def _numa_mode(text: str | None) -> str | None:
    if text not in (None, *MODES):
        raise LaunchError(f"--numa-binding {text!r}: allowed: {', '.join(MODES)}")
    return text


def _words(text: str | None) -> tuple[str, ...]:
    """Return what stands between commas; two of them are one that separates nothing."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _ranks(option: str, text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise LaunchError(f"{option} {text!r}: allowed: ranks with commas between them: 0,1") from None


def _signals(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(signal.Signals[name.strip()]) for name in (text or DEFAULT_SIGNALS).split(","))
    except KeyError as unknown:
        raise LaunchError(f"--signals-to-handle {text!r}: there is no signal {unknown}") from None
