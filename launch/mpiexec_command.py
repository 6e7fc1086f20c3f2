"""The command line and environment with which each flavour of ``mpiexec`` starts ranks on this machine.

What is asked for, in each flavour's words: as many ranks as wanted, however few processors there are, and no
binding to processors (a training process has threads of its own: data loaders, autograd, gloo). Ranks of one
machine talk through shared memory, so that none of them listens on a network.
"""

from collections.abc import Sequence

from gradsplit.launch.mpi_environment import Flavour, MpiInstallation


def mpiexec_command(installation: MpiInstallation, processes: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts ``processes`` ranks of ``program`` on this machine."""
    match installation.flavour:
        case Flavour.OPEN_MPI:
            options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        case Flavour.MPICH:
            options = ["-bind-to", "none"]
        case Flavour.INTEL | Flavour.OTHER:  # Intel MPI binds by a variable; see mpiexec_variables.
            options = []
    return [str(installation.mpiexec), "-n", str(processes), *options, *program]


def mpiexec_variables(installation: MpiInstallation, as_root: bool) -> dict[str, str]:
    """Return the environment variables to add for ``mpiexec`` and its ranks.

    ``as_root``: whether the user is root, whom Open MPI refuses unless told twice that it is meant.
    """
    variables = {"MPI4PY_LIBMPI": installation.library_names()}
    if installation.flavour is Flavour.OPEN_MPI:
        variables["OMPI_MCA_pml"] = "ob1"
        variables["OMPI_MCA_btl"] = "^tcp,ofi,uct,openib,usnic"
        if as_root:
            for tool in ("OMPI", "PRTE"):
                variables[f"{tool}_ALLOW_RUN_AS_ROOT"] = "1"
                variables[f"{tool}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if installation.flavour is Flavour.INTEL:
        variables["I_MPI_PIN"] = "0"
    return variables
