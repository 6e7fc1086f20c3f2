"""Graphs that fail in a user's program are written as programs and made smaller, where the environment asks for it.

The program goes on as it would: what compiling a graph raises is raised, after the graph was written.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from gradsplit.compile_core.backends.registry import Backend, GraphBackend, list_backends
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.minimizer.outcome import raised
from gradsplit.compile_core.minimizer.write_repro import CannotWriteError, Settings, write_repro
from gradsplit.compile_core.options import RUN_VARIABLES, CompileOptions, ReproRequest
from gradsplit.compile_core.run_record import folder_of_process

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)
_LIMIT_S = 600.0
# What `gradsplit.minimize` exits with where the graph does not fail; 1 and 2 are Python's and argparse's.
DOES_NOT_FAIL = 3
# Ranks of a group that a graph is tried on, if the program has more than one.
_RANKS = 2

# The graphs that this process has written, with what they failed of: a loop may meet the same failure in each step.
_written: set[tuple[Any, ...]] = set()


class GraphFailures:
    """Writes what becomes of one graph, as ``request`` says; nothing, if there is none.

    Args:
        captured: the graph.
        inputs: of its first call, which is about to come.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        inputs: Sequence[Any],
        backend: Backend,
        options: CompileOptions,
        request: ReproRequest | None,
    ) -> None:
        self._captured, self._inputs = captured, inputs
        self._backend, self._options, self._request = backend, options, request

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While the graph is compiled: it is written if that raises; at level 3 and 4 it is tried before."""
        if self._request is not None and self._request.level >= 3:
            self._write("a graph that was tried before it was compiled")
        try:
            yield
        except Unsupported:
            raise
        except Exception as error:
            self._write_raised("compiling it", error)
            raise

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What was compiled; the graph is written if a call of it raises. At level 4 a call whose inputs have other
        sizes, layouts or types than those of the first is tried, too: guards let it through."""
        if self._request is None or self._request.level == 3:
            return compiled
        if self._request.level < 3:
            return self._watched_for_errors(compiled)
        first, is_tried = [*map(_form_of, self._inputs)], False

        def run(*given: Any) -> Any:
            nonlocal is_tried
            if not is_tried and [*map(_form_of, given)] != first:
                is_tried = True
                self._write("a graph whose second call was tried", given)
            return compiled(*given)

        return run

    def _watched_for_errors(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            try:
                return compiled(*given)
            except Exception as error:
                self._write_raised("running it", error)
                raise

        return run

    def _write_raised(self, doing: str, error: Exception) -> None:
        if self._request is not None and self._request.level < 3:
            self._write(f"{doing} raised {type(error).__name__}: {error}", what=raised(error).what)

    def _write(self, says: str, again: Sequence[Any] | None = None, what: str = "") -> None:
        assert self._request is not None
        forms = tuple(_form_of(value) for value in (*self._inputs, *(again or ())))
        key = (self._backend.name, self._captured.module.code, forms, what)
        if key in _written:
            return
        _written.add(key)
        if (
            isinstance(self._backend, GraphBackend)
            and getattr(self._backend.compile, "__module__", "") == "__main__"
        ):
            logger.warning(
                "a graph that fails is not written: the backend %r is in the program's main file, and other processes "
                "import it from a module only",
                self._backend.name,
            )
            return
        settings = _settings(self._backend, self._options, self._request, self._inputs)
        if again is not None:
            settings = replace(settings, dynamic=self._captured.has_open_sizes)
        _write(self._captured.module, self._inputs, again, settings, self._request, says)


def _form_of(value: Any) -> Any:
    """What guards ask of an input that may take any value."""
    if not isinstance(value, Tensor):
        return value if type(value) is int else type(value)
    layout = value.stride() if value.layout == torch.strided else value.layout
    return value.shape, layout, value.dtype, value.device, value.requires_grad


def _settings(
    backend: Backend, options: CompileOptions, request: ReproRequest, inputs: Sequence[Any]
) -> Settings:
    name, imports = backend.name, ()
    if isinstance(backend, GraphBackend):
        module, qualified = (
            getattr(backend.compile, "__module__", ""),
            getattr(backend.compile, "__qualname__", ""),
        )
        if module and qualified.isidentifier():
            imports = (module,)  # which registers it, if anything does
            name = name if name in list_backends(None) else f"{module}:{qualified}"
    is_on_cpu = all(value.device.type == "cpu" for value in inputs if isinstance(value, Tensor))
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Settings(
        name,
        imports,
        level=request.level,
        skipped_passes=tuple(sorted(options.skipped_passes)),
        options=_changed(options),
        ranks=_RANKS if is_on_cpu and has_ranks else 1,
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
    module: fx.GraphModule,
    inputs: Sequence[Any],
    again: Sequence[Any] | None,
    settings: Settings,
    request: ReproRequest,
    says: str,
) -> None:
    number, folder = next(_numbers), folder_of_process(request.folder)
    folder = folder if number == 1 else folder / f"graph_{number}"
    try:
        whole = folder / "whole" if request.level > 1 else folder
        path = write_repro(whole, module, inputs, settings, says, again=again)
    except (CannotWriteError, OSError) as reason:
        logger.warning("a graph that fails is not written: %s", reason)
        return
    if request.level == 1:
        logger.warning("a graph that fails was written: %s", path)
        return
    # Forward and backward as one graph have a call's cotangents among their inputs: of a second call nobody has them.
    said = _minimize(path, folder, request.after if again is None else "capture")
    if said:
        logger.warning("a graph that fails was made smaller: %s", said)
    elif request.level == 2:
        logger.warning("a graph that fails here, and not in a process of its own, was written: %s", path)


def _minimize(path: Path, folder: Path, after: str) -> str:
    """The last line of what makes it smaller; "" if the graph does not fail there."""
    # A run of its own: it would take the place of this process in a report.
    environment = {**os.environ, **dict.fromkeys(RUN_VARIABLES, "")}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-m", "gradsplit.minimize", str(path), "--out", str(folder)]
    command += ["--after", after]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_LIMIT_S:.0f} s; the whole graph is {path}"
    if run.returncode not in (0, DOES_NOT_FAIL):
        return f"that failed itself, so it is the whole graph, {path}: {run.stderr[-2000:]}"
    return run.stdout.strip().rpartition("\n")[2] if run.returncode == 0 else ""
