"""The command line: torchrun's options, by their names, defaults and ``PET_…`` variables, and a few of our own."""

import argparse
import os
from collections.abc import Mapping
from typing import NoReturn

from gradsplit.launch.errors import LaunchError

_DESCRIPTION = """\
Starts the processes of a training job with torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
...): under mpiexec, mpirun or srun one per rank, elsewhere on this machine, or on those of a hostfile through mpiexec.
`python -m gradsplit.launch` is the same command. `mpi-torchrun doctor [options]` examines the machines instead."""

_EPILOG = """\
An option may be spelt with underscores, and be given as a variable: PET_NPROC_PER_NODE=2. The exit code is that of the
process that failed first (128+N when signal N killed it); 2 for a bad command line."""

WITHOUT_EFFECT = {
    "rdzv_backend": "ranks meet at a port that rank 0 picks",
    "rdzv_endpoint": "ranks meet at a port that rank 0 picks",
    "rdzv_conf": "ranks meet at a port that rank 0 picks",
    "node_rank": "nodes are numbered by their ranks",
    "monitor_interval": "processes are watched every 10 ms",
    "start_method": "each process is a program of its own",
    "event_log_handler": "no events are recorded",
    "logs_specs": "logs are written by this launcher",
}
"""torchrun's options that are accepted, and why they do nothing."""


class _Parser(argparse.ArgumentParser):
    """Reports a fault in one line, without a page of usage around it."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def parse_options(arguments: list[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Return the options; ``command`` among them is the entry and its arguments. What was not given is None or False.

    Raises `LaunchError` for what is no option, has no value or has one too many.
    """
    parser = _Parser(
        prog="mpi-torchrun",
        usage="%(prog)s [options] script.py [script arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def spellings(names: tuple[str, ...]) -> list[str]:
        return list(dict.fromkeys([*names, names[-1][:2] + names[-1][2:].replace("-", "_")]))

    def value(*names: str, shown: str, about: str) -> None:
        default = environment.get("PET_" + names[-1][2:].replace("-", "_").upper())
        parser.add_argument(
            *spellings(names),
            dest=names[-1][2:].replace("-", "_"),
            default=default,
            metavar=shown,
            help=about,
        )

    def flag(*names: str, about: str) -> None:
        name = names[-1][2:].replace("-", "_")
        default = environment.get("PET_" + name.upper(), "0") != "0"
        parser.add_argument(*spellings(names), dest=name, action="store_true", default=default, help=about)

    value(
        "--nproc-per-node",
        shown="N",
        about="processes on each node: a number, auto, cpu, gpu or xpu (default 1)",
    )
    value(
        "--nnodes",
        shown="N|MIN:MAX",
        about="number of nodes, of a hostfile's or of a scheduler's allocation; of a range MPI's size decides",
    )
    flag("--standalone", about="the same as --nnodes 1")
    value("--hostfile", shown="FILE", about="start mpiexec on these machines, one a line")
    value("--mpi-args", shown="ARGS", about="start mpiexec, with these further arguments of its own")
    value("--bind", shown="TO", about="what mpiexec binds ranks to (default: none)")
    value("--rdzv-id", shown="ID", about="the job's name (default: a random one)")
    value(
        "--master-addr",
        shown="ADDRESS",
        about="where rank 0 listens (default: its host name; 127.0.0.1 on one node)",
    )
    value("--master-port", shown="PORT", about="(default: a port that is free on rank 0's node)")
    value("--local-addr", shown="ADDRESS", about="this node's address, in place of its host name")
    value(
        "--max-restarts", shown="N", about="how often the group is started again after a failure (default 0)"
    )
    value("--role", shown="NAME", about="of all processes (default: default)")
    flag("-m", "--module", about="the entry is a Python module")
    flag("--no-python", about="the entry is a program of its own, not a Python script")
    flag("--run-path", about="the entry is a Python script, also with --no-python")
    value(
        "--log-dir",
        shown="DIR",
        about="keep each process's output here: ID/attempt_N/RANK/stdout.log and stderr.log",
    )
    value(
        "-r",
        "--redirects",
        shown="STREAMS",
        about="to files only: 1 standard output, 2 error, 3 both; or 0:1,1:3",
    )
    value(
        "-t", "--tee", shown="STREAMS", about="the same, and to the screen with [node:rank] before each line"
    )
    value("--local-ranks-filter", shown="RANKS", about="show these local ranks' output alone: 0,1")
    value("--ranks-filter", shown="RANKS", about="show these ranks' output alone")
    for stream in "stdout", "stderr":
        value(
            f"--duplicate-{stream}-filters",
            shown="WORDS",
            about=f"teed lines with one of these (a,b) also go to filtered_{stream}.log, of all ranks",
        )
    value(
        "--numa-binding",
        shown="MODE",
        about="run each process on processors near its GPU: node, socket, exclusive, core-complex",
    )
    value(
        "--signals-to-handle",
        shown="SIGNALS",
        about="that end the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
    )
    value(
        "--shutdown-timeout",
        shown="S",
        about="from SIGTERM to SIGKILL (default 30; 4.5 once another rank has failed)",
    )
    flag("--virtual-local-rank", about="LOCAL_RANK is 0 everywhere, and each process sees its own GPU alone")
    flag("--no-preflight", about="do not compare the machines of a job on several first")
    flag("--dry-run", about="print each rank's environment and the command, and start nothing")
    for name, reason in WITHOUT_EFFECT.items():
        value("--" + name.replace("_", "-"), shown="…", about=f"accepted, without effect: {reason}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


def told_without_effect(options: argparse.Namespace) -> str | None:
    """Return one line on the options that were given and do nothing; None without any."""
    given = [
        f"--{n.replace('_', '-')} ({why})"
        for n, why in WITHOUT_EFFECT.items()
        if getattr(options, n) is not None
    ]
    return f"without effect here: {', '.join(given)}" if given else None
