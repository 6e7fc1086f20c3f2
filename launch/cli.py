"""The command line: torchrun's spelling of the options that make sense under MPI.

Parsed by hand: everything after the entry belongs to the user's program untouched, and a fault is one line
that names it, where ``argparse`` prints a usage page and has changed its treatment of ``--`` between
versions.
"""

import os
import sys
from collections.abc import Sequence

from gradsplit.launch.entry import check_entry
from gradsplit.launch.errors import USAGE_EXIT_CODE, LaunchError, let_rank_0_tell
from gradsplit.launch.job import run_job
from gradsplit.launch.launch_spec import EntryKind, LaunchSpec
from gradsplit.launch.mpi_variables import mpi_rank
from gradsplit.launch.process_count import parse_process_count
from gradsplit.launch.worker import run_rank

HELP = """\
usage: mpi-torchrun [options] script.py [script arguments]
       mpi-torchrun [options] -m module [arguments]
       mpiexec -n 4 [...] mpi-torchrun [options] script.py [script arguments]

Starts one process per MPI rank with torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, ...). Without an MPI job around it, it starts the processes itself on this machine, or on those of
a hostfile through mpiexec.
`python -m gradsplit.launch` is the same command.

  --nproc-per-node N|cpu|gpu|auto  processes on each node (default 1; under mpiexec: must match, if given)
  --nnodes N                       number of nodes (under mpiexec: must match; otherwise only 1)
  --hostfile FILE                  start mpiexec on these machines, one a line
  --standalone                     the same as --nnodes 1
  --master-addr ADDRESS            where rank 0 listens (default: its host name; 127.0.0.1 on a single node)
  --master-port PORT               1 to 65535 (default: a port that is free on rank 0's node)
  -m, --module                     the entry is a Python module
  --no-python                      the entry is a program of its own, not a Python script
  -h, --help                       print this text

Each dash inside an option may be an underscore. OMP_NUM_THREADS is set to 1 where a node has several
processes and it was unset. The exit code is that of the first rank that failed (128+N when signal N killed
it); 2 for a bad command line.
"""

VALUE_OPTIONS = ("--nproc-per-node", "--nnodes", "--hostfile", "--master-addr", "--master-port")
FLAGS = ("--standalone", "--module", "--no-python", "--help")
SHORT_FLAGS = {"-m": "--module", "-h": "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: those of the process) and return its exit code.

    Errors of the command line are one line on standard error and exit code 2; when ``mpiexec`` runs this on
    several ranks, rank 0 alone prints it.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    rank = mpi_rank(os.environ)
    exit_code = _run(arguments, rank)
    if exit_code:
        let_rank_0_tell(rank)
    return exit_code


def _run(arguments: Sequence[str], rank: int | None) -> int:
    try:
        options, rest = split_arguments(arguments)
        if "--help" in options:
            if not rank:
                print(HELP, end="")
            return 0
        spec = parse_spec(options, rest)
        if rank is not None:
            return run_rank(spec)
        check_entry(spec)  # Ranks do it together, each on its own node.
        return run_job(spec)
    except LaunchError as error:
        if not rank:
            print(f"launch: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (option → value, the entry and its arguments); a flag's value is the empty string.

    The first word that is no option is the entry, as is the word after ``--``. Raises `LaunchError` for an
    unknown option, a missing value, or a value for a flag.
    """
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = SHORT_FLAGS.get(name) or name[:2] + name[2:].replace("_", "-")
        if name in FLAGS:
            if equals:
                raise LaunchError(f"option {name} takes no value, got {value!r}")
        elif name in VALUE_OPTIONS:
            if not equals:
                if not rest:
                    raise LaunchError(f"option {name} needs a value")
                value = rest.pop(0)
        else:
            allowed = ", ".join([*VALUE_OPTIONS, *FLAGS, *SHORT_FLAGS])
            raise LaunchError(f"unknown option {word!r}; allowed before the script: {allowed}")
        options[name] = value
    return options, rest


def parse_spec(options: dict[str, str], rest: Sequence[str]) -> LaunchSpec:
    """Return the launch that ``options`` and ``rest`` (from `split_arguments`) describe."""
    if "--module" in options and "--no-python" in options:
        raise LaunchError("--module and --no-python exclude each other: a module is run by Python")
    kind = EntryKind.SCRIPT
    if "--module" in options:
        kind = EntryKind.MODULE
    elif "--no-python" in options:
        kind = EntryKind.PROGRAM
    if not rest:
        raise LaunchError(f"no {kind} given; expected: [options] {kind} [arguments]")
    processes = options.get("--nproc-per-node")
    address = options.get("--master-addr")
    if address is not None and not address.strip():
        raise LaunchError("--master-addr is empty; allowed: a host name or IP address of rank 0's node")
    return LaunchSpec(
        entry=rest[0],
        entry_kind=kind,
        arguments=tuple(rest[1:]),
        processes_per_node=None if processes is None else parse_process_count(processes),
        nodes=_parse_nodes(options),
        master_address=address,
        master_port=_parse_port(options.get("--master-port")),
        hostfile=options.get("--hostfile"),
    )


def _parse_nodes(options: dict[str, str]) -> int | None:
    text = options.get("--nnodes")
    if text is None:
        return 1 if "--standalone" in options else None
    low, colon, high = text.partition(":")  # torchrun's MIN:MAX; a job under MPI does not change its size.
    if colon and low == high:
        text = low
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(f"--nnodes {text!r}: allowed: a whole number from 1 (no elastic ranges under MPI)")
    if "--standalone" in options and int(text) != 1:
        raise LaunchError(f"--standalone means --nnodes 1, got --nnodes {text}")
    return int(text)


def _parse_port(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise LaunchError(f"--master-port {text!r}: allowed: a whole number from 1 to 65535")
    return int(text)
