"""Folders whose programs may be loaded: those that nobody but this user and root may write to.

What a cache holds runs with all rights of whoever loads it, and a manifest beside it reveals damage, not malice. So
the rules are those of ssh and sudo for their files: a folder and all above it belong to the user or to root, and others
may write to none of them, but to one like ``/tmp``, where they cannot touch what is not theirs. Links are followed
once, and from then on the folder is known by its real path. What lies in such a folder is looked at too: it may have
been open to others once. File systems that are mounted ``noexec`` hold nothing that can be loaded.

Instead of a folder that will not do there is one for temporary files: ``gradsplit-<user>``, or a new one until this
process ends where somebody else has made that.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from gradsplit.compile_core.errors import CompileError

logger = logging.getLogger(__name__)

# Folders are made so whatever the user's umask is.
MODE = 0o755
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@cache
def usable_folder(wanted: Path) -> Path:
    """The folder itself, made if need be, or another one after a warning; its real path.

    Raises:
        CompileError: programs can be loaded from no folder of this machine.
    """
    if wanted.parts[:1] == ("~",):  # what nobody could expand
        fault = "the user has no home: HOME is not set, and the system does not know the user"
    else:
        folder = Path(os.path.realpath(wanted))
        fault = _making_fails(folder) or _fault(folder)
        if not fault:
            return folder
    parent = temporary_parent()
    folder = parent / f"gradsplit-{os.geteuid()}"
    if _making_fails(folder) or _fault(folder):
        folder = Path(tempfile.mkdtemp(prefix="gradsplit-", dir=parent))
        atexit.register(_remove, folder, os.getpid())
    logger.warning(
        "build results are not kept in %s, but in %s: %s. Let only its owner write there (chmod -R go-w), or choose "
        "another folder (GRADSPLIT_CACHE).",
        wanted,
        folder,
        fault,
    )
    return folder


@cache
def temporary_parent() -> Path:
    """Where a new folder of this user's is safe from others, and programs can be loaded from.

    Raises:
        CompileError: there is no such place.
    """
    faults = []
    for name in (tempfile.gettempdir(), "/var/tmp", "/dev/shm"):
        folder = Path(os.path.realpath(name))
        fault = _fault(folder, is_shared=True)
        if not fault and os.access(folder, os.W_OK):
            return folder
        faults.append(fault or f"{folder} may only be read")
    raise CompileError(
        f"Compiled programs cannot be loaded from anywhere here: {'; '.join(faults)}. Set GRADSPLIT_CACHE, or TMPDIR, "
        "to a folder that only you can write to."
    )


def fault_of_owner(path: Path, is_shared: bool = False) -> str:
    """What makes others able to change a file or folder, in words; empty if nothing does.

    Args:
        is_shared: whether it is a folder to which all may write if only owners can rename and remove.

    Raises:
        OSError: it cannot be looked at.
    """
    status = os.lstat(path)
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & _FOR_OTHERS and not (is_shared and status.st_mode & stat.S_ISVTX):
        return f"other users may write to {path}"
    return ""


def _fault(folder: Path, is_shared: bool = False) -> str:
    """Why nothing may be loaded from a folder, if so."""
    try:
        places = [(above, True) for above in reversed(folder.parents[:-1])] + [(folder, is_shared)]
        faults = [fault_of_owner(*place) for place in places]
        if not is_shared:  # which may have been open to others before
            for inside in folder.iterdir():
                with suppress(FileNotFoundError):  # another process has built its entry, or removed it
                    faults.append(fault_of_owner(inside))
        if fault := next(filter(None, faults), ""):
            return fault
        if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
            return f"{folder} is on a file system that is mounted noexec"
    except OSError as error:
        return str(error)
    return ""


def _making_fails(folder: Path) -> str:
    try:
        for place in (*reversed(folder.parents), folder):
            if not os.path.exists(place):
                place.mkdir(MODE, exist_ok=True)
    except OSError as error:
        return str(error)
    return ""


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)
