"""The command line and environment with which each flavour of ``mpiexec`` starts ranks.

What is asked for, in each flavour's words: as many ranks as wanted, however few processors there are, and no
binding to processors (a training process has threads of its own: data loaders, autograd, gloo).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsplit.launch.errors import LaunchError
from gradsplit.launch.mpi_environment import Flavour, MpiInstallation


def mpiexec_command(
    installation: MpiInstallation,
    processes: int,
    program: Sequence[str],
    per_node: int | None = None,
    bind_to: str = "none",
) -> list[str]:
    """Return the command that starts ``processes`` ranks of ``program``, ``per_node`` on each machine if given."""
    match installation.flavour:
        case Flavour.OPEN_MPI:
            nodes = "" if per_node is None else f"ppr:{per_node}:node"
            options = ["--bind-to", bind_to, "--map-by", f"{nodes}:OVERSUBSCRIBE"]
        case Flavour.MPICH:
            options = ["-bind-to", bind_to]
        case Flavour.INTEL | Flavour.OTHER:  # Intel MPI binds by a variable; see mpiexec_variables.
            options = []
    if per_node is not None and installation.flavour is not Flavour.OPEN_MPI:
        options += ["-ppn", str(per_node)]
    return [str(installation.mpiexec), "-n", str(processes), *options, *program]


def mpiexec_variables(installation: MpiInstallation, as_root: bool) -> dict[str, str]:
    """Return the environment variables to add for ``mpiexec`` and its ranks.

    ``as_root``: whether the user is root, whom Open MPI refuses unless two variables say that it is meant.
    """
    variables = {"MPI4PY_LIBMPI": installation.library_names()}
    if installation.flavour is Flavour.OPEN_MPI and as_root:
        for tool in ("OMPI", "PRTE"):
            variables[f"{tool}_ALLOW_RUN_AS_ROOT"] = "1"
            variables[f"{tool}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if installation.flavour is Flavour.INTEL:
        variables["I_MPI_PIN"] = "0"
    return variables


def hosts_in(hostfile: Path) -> list[str]:
    """Return the machines that a hostfile names, one a line; what follows the name is the ``mpiexec``'s own."""
    try:
        lines = [line.partition("#")[0].split() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise LaunchError(f"--hostfile {str(hostfile)!r}: {error.strerror}") from error
    hosts = list(dict.fromkeys(words[0] for words in lines if words))
    if not hosts:
        raise LaunchError(f"--hostfile {str(hostfile)!r} names no machine; expected: one a line")
    return hosts


def cluster_options(
    installation: MpiInstallation, hostfile: str | None, environment: Mapping[str, str]
) -> list[str]:
    """Return the options that start ranks on the machines of ``hostfile``, if given, all with ``environment``."""
    if installation.flavour is not Flavour.OPEN_MPI:  # Hydra hands the environment on unasked.
        return [] if hostfile is None else ["-f", hostfile]
    hosts = [] if hostfile is None else ["--hostfile", hostfile]
    return [*hosts, *(word for name in environment if name.isidentifier() for word in ("-x", name))]
