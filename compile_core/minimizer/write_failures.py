"""Graphs that fail in a user's program are written as programs and made smaller, where the environment asks for it.

The program goes on as it would: what compiling a graph raises is raised, after the graph was written.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gradsplit.compile_core.backends.registry import Backend, GraphBackend, list_backends
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.minimizer.write_repro import CannotWriteError, Settings, write_repro
from gradsplit.compile_core.options import CompileOptions, ReproRequest, requested_repro

logger = logging.getLogger(__name__)

CompileCaptured = Callable[[CapturedGraph, Sequence[Any]], Callable[..., Any]]

_numbers = itertools.count(1)
_LIMIT_S = 600.0
# What `gradsplit.minimize` exits with where the graph does not fail; 1 and 2 are Python's and argparse's.
DOES_NOT_FAIL = 3


def writing_failures(
    compile_captured: CompileCaptured, backend: Backend, options: CompileOptions
) -> CompileCaptured:
    """What compiles graphs and writes those that fail, as ``options.ReproRequest`` says; itself, if nothing is asked.

    Raises:
        ValueError: the environment asks for what there is not.
    """
    request = requested_repro()
    if request is None:
        return compile_captured

    def compile_or_write(captured: CapturedGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        def write(says: str) -> None:
            _write(captured, inputs, _settings(backend, options, request), request, says)

        if request.level >= 3:
            write("a graph that was tried before it was compiled")
        try:
            compiled = compile_captured(captured, inputs)
        except Unsupported:
            raise
        except Exception as error:
            if request.level < 3:
                write(f"compiling it raised {type(error).__name__}: {error}")
            raise
        if request.level >= 3:
            return compiled

        def run(*given: Any) -> Any:
            try:
                return compiled(*given)
            except Exception as error:
                write(f"running it raised {type(error).__name__}: {error}")
                raise

        return run

    return compile_or_write


def _settings(backend: Backend, options: CompileOptions, request: ReproRequest) -> Settings:
    name, imports = backend.name, ()
    if isinstance(backend, GraphBackend):
        module, qualified = (
            getattr(backend.compile, "__module__", ""),
            getattr(backend.compile, "__qualname__", ""),
        )
        if module and module != "__main__" and qualified.isidentifier():
            imports = (module,)  # which registers it, if anything does
            name = name if name in list_backends(None) else f"{module}:{qualified}"
    return Settings(
        name, imports, request.after, request.level, tuple(sorted(options.skipped_passes)), _changed(options)
    )


def _changed(options: CompileOptions) -> Mapping[str, Any]:
    """The options that are not the default ones and can be written."""
    defaults = CompileOptions()
    values = {
        row.metadata["option"].name or row.name: getattr(options, row.name)
        for row in fields(options)
        if getattr(options, row.name) != getattr(defaults, row.name)
    }
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}


def _write(
    captured: CapturedGraph, inputs: Sequence[Any], settings: Settings, request: ReproRequest, says: str
) -> None:
    number = next(_numbers)
    folder = request.folder if number == 1 else request.folder / f"graph_{number}"
    try:
        path = write_repro(
            folder / "whole" if request.level > 1 else folder, captured.module, inputs, settings, says
        )
    except CannotWriteError as reason:
        logger.warning("a graph that fails is not written: %s", reason)
        return
    if request.level == 1:
        logger.warning("a graph that fails was written: %s", path)
        return
    said = _minimize(path, folder)
    if said:
        logger.warning("a graph that fails was made smaller: %s", said)
    elif request.level == 2:
        logger.warning("a graph that fails here, and not in a process of its own, was written: %s", path)


def _minimize(path: Path, folder: Path) -> str:
    """The last line of what makes it smaller; "" if the graph does not fail there."""
    environment = {**os.environ, "GRADSPLIT_REPRO_AFTER": ""}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-m", "gradsplit.minimize", str(path), "--out", str(folder)]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_LIMIT_S:.0f} s; the whole graph is {path}"
    if run.returncode not in (0, DOES_NOT_FAIL):
        return f"that failed itself, so it is the whole graph, {path}: {run.stderr[-2000:]}"
    return run.stdout.strip().rpartition("\n")[2] if run.returncode == 0 else ""
