"""Is there something to run? Checked first, so that N ranks do not each fail on a misspelt name."""

import importlib.util
import os
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from gradsplit.launch.errors import LaunchError
from gradsplit.launch.launch_spec import EntryKind, LaunchSpec


def check_entry(spec: LaunchSpec) -> Path | None:
    """Return the file of the entry of ``spec``, None where that is unknown.

    Raises `LaunchError` when it does not exist or cannot be run.
    """
    match spec.entry_kind:
        case EntryKind.SCRIPT:
            return _check_script(spec.entry)
        case EntryKind.MODULE:
            return _check_module(spec.entry)
        case EntryKind.PROGRAM:
            program = shutil.which(spec.entry)
            if program is None:
                raise LaunchError(f"program {spec.entry!r} not found on PATH, or not executable")
            return Path(program)


def _check_script(entry: str) -> Path:
    script = Path(entry)
    if not script.exists():
        raise LaunchError(f"script {entry!r} does not exist (working directory: {os.getcwd()!r})")
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise LaunchError(f"{entry!r} is a directory without a __main__.py; expected a Python script")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"script {entry!r} is not readable")
    return script / "__main__.py" if script.is_dir() else script


def _check_module(entry: str) -> Path | None:
    """Look the module up without importing its packages, which is the ranks' business."""
    first, *others = entry.split(".")
    try:
        # `python -m` looks in the working directory first; the console script's own sys.path lacks it.
        found = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
        for name in others:
            if found is None or found.submodule_search_locations is None:
                found = None
                break
            # By its last name: a folder without __init__.py would look for its parent among the imported modules.
            found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    except (ValueError, ImportError):
        found = None
    if found is None:
        raise LaunchError(f"module {entry!r} not found (working directory: {os.getcwd()!r})")
    if found.submodule_search_locations is not None:
        found = PathFinder.find_spec("__main__", list(found.submodule_search_locations))
    return Path(found.origin) if found is not None and found.has_location and found.origin else None
