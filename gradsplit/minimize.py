"""``python -m gradsplit.minimize FILE``: makes a program that fails under gradsplit smaller, as long as it fails alike.

The file is a ``repro.py`` that ``GRADSPLIT_REPRO_AFTER`` wrote, or any Python file with ``Program``, a class of
``torch.nn.Module``, and ``inputs``, a function that returns the list of its inputs. If it has a function ``again``,
a second call with those is tried, which finds guards that let it through to what was compiled for the first. Small
programs are written to ``FOLDER/repro.py``; running one compiles it and fails as the large one did.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.backends.registry import Backend, RegionBackend, resolve_backend
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.interface.api import compile
from gradsplit.compile_core.interface.graph_compiler import compile_any_graph
from gradsplit.compile_core.minimizer.minimize import Minimized, minimize
from gradsplit.compile_core.minimizer.outcome import CompileGraph, Outcome, copied, outcome_of, results_of
from gradsplit.compile_core.minimizer.rank_trials import on_ranks
from gradsplit.compile_core.minimizer.reduce import with_examples
from gradsplit.compile_core.minimizer.repro_inputs import draw, stored
from gradsplit.compile_core.minimizer.subgraph import Candidate
from gradsplit.compile_core.minimizer.write_failures import DOES_NOT_FAIL
from gradsplit.compile_core.minimizer.write_repro import Settings
from gradsplit.compile_core.options import parse_options
from gradsplit.compile_core.passes import CAPTURED_PASSES, JOINT_PASSES, LOOP_PASSES
from gradsplit.compile_core.pipeline import device_type_of
from gradsplit.compile_core.torch_facts.fakes_like import fakes_like

__all__ = ["Settings", "draw", "main", "minimize_file", "reproduce", "stored"]


def reproduce(
    program: torch.nn.Module,
    inputs: Sequence[Any],
    settings: Settings,
    again: Sequence[Any] | None = None,
) -> None:
    """Compiles and runs a written program, forward and backward, in this process.

    Raises:
        Exception: what compiling or running it raises; ``AssertionError`` where results are not plain PyTorch's.
    """
    candidate = captured(program, inputs, again, settings.dynamic)
    if settings.level < 4 and settings.ranks == 1 and again is None:
        # So that what is raised has its own stack.
        compiled = _compiler(settings)(candidate.module, candidate.inputs)
        results_of(compiled, candidate.inputs, settings.after == "capture")
    outcome = attempt(candidate, settings)
    if outcome.is_failure:
        raise AssertionError(str(outcome))
    print("it does not fail:", outcome)


def captured(
    program: torch.nn.Module,
    inputs: Sequence[Any],
    again: Sequence[Any] | None = None,
    dynamic: bool = False,
) -> Candidate:
    """The graph that the program is, with the inputs of its first call and of its second, if there is one."""
    found: list[Candidate] = []

    def keep(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        def run(*given: Any) -> Any:
            found.append(Candidate(module, tuple(map(copied, given))))
            return module(*given)

        return run

    compiled = compile(program, backend=keep, fullgraph=True, dynamic=dynamic)
    compiled(*inputs)
    if len(found) != 1:
        raise CompileError(f"the program is {len(found)} graphs, and not one")
    if again is None:
        return with_examples(found[0])
    compiled(*again)
    return with_examples(replace(found[0], again=found[1].inputs))


def attempt(candidate: Candidate, settings: Settings) -> Outcome:
    """Compiles and runs a graph in this process, and forks of it that are the other ranks, beside plain PyTorch."""
    takes_gradients = settings.after == "capture"  # else the graph has them among its results

    def compile_guarded(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        skipped = {"skip_passes": [*settings.skipped_passes]} if settings.skipped_passes else {}
        options = {**settings.options, **skipped} or None
        compiled = compile(
            module, backend=_named_backend(settings), dynamic=settings.dynamic, options=options
        )
        results_of(compiled, candidate.inputs, takes_gradients)
        return compiled

    def run() -> Outcome:
        compiler = _compiler(settings) if candidate.again is None else compile_guarded
        inputs = candidate.inputs if candidate.again is None else candidate.again
        return outcome_of(candidate.module, inputs, compiler, settings.level == 4, takes_gradients)

    return run() if settings.ranks == 1 else on_ranks(run, settings.ranks)


def _compiler(settings: Settings) -> CompileGraph:
    backend = _backend(settings)
    options = replace(
        parse_options(None, settings.options), skipped_passes=frozenset(settings.skipped_passes)
    )
    return lambda module, inputs: compile_any_graph(module, inputs, backend, options)


def _backend(settings: Settings) -> Backend:
    return resolve_backend(_named_backend(settings))


def _named_backend(settings: Settings) -> Any:
    for name in settings.imports:
        importlib.import_module(name)
    module, found, name = settings.backend.rpartition(":")
    return getattr(importlib.import_module(module), name) if found else settings.backend


def joint_of(candidate: Candidate, settings: Settings) -> Candidate:
    """Forward and backward of a graph as one graph of ATen's operators, with the inputs of both."""
    backend = _backend(settings)
    examples = fakes_like(candidate.inputs)
    decompositions = (
        backend.decompositions(device_type_of(examples), parse_options(None, settings.options))
        if isinstance(backend, RegionBackend)
        else {}
    )
    joint = trace_joint(candidate.module, examples, decompositions)
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    given = [*candidate.inputs]
    cotangents = [
        draw(
            k,
            node.meta["val"].shape,
            node.meta["val"].stride(),
            node.meta["val"].dtype,
            str(node.meta["val"].device),
        )
        for k, node in enumerate(placeholders[len(given) :])
    ]
    inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in (*given, *cotangents)]
    return with_examples(Candidate(joint.module, tuple(inputs)))


def minimize_file(
    path: Path,
    folder: Path,
    after: str | None = None,
    level: int | None = None,
    backend: str | None = None,
    ranks: int | None = None,
) -> Minimized:
    """``minimize`` of the program in a file; changes this process's threads, and hides GPUs that it does not name."""
    if "cuda" not in path.read_text(encoding="utf-8"):
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # where a process has found GPUs, backwards in its forks abort
        )
    found = runpy.run_path(str(path))
    settings = found.get("SETTINGS", Settings("triton"))
    settings = replace(
        settings,
        after=after or settings.after,
        level=level or settings.level,
        backend=backend or settings.backend,
        ranks=ranks or settings.ranks,
    )
    _backend(settings)
    again = found["again"]() if "again" in found else None
    candidate = captured(found["Program"](), found["inputs"](), again, settings.dynamic)
    if settings.after == "aot" and found.get("SETTINGS", Settings("triton")).after != "aot":
        candidate = joint_of(candidate, settings)
    tables = (CAPTURED_PASSES, JOINT_PASSES, LOOP_PASSES)
    has_passes = isinstance(_backend(settings), RegionBackend)
    names = [row.name for table in tables for row in table] if has_passes else []
    torch.set_num_threads(1)
    return minimize(candidate, settings, attempt, folder, names, says=lambda line: print(line, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gradsplit.minimize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--out", type=Path, help="folder of the small program; by default minimized beside the file"
    )
    parser.add_argument("--after", choices=("capture", "aot"), help="which graph is made smaller")
    parser.add_argument("--level", type=int, choices=(2, 3, 4), help="4: results are compared, too")
    parser.add_argument("--backend", help="a name, or module:name")
    parser.add_argument("--ranks", type=int, help="processes of a gloo group that each compile and run it")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        parser.error(f"there is no file {arguments.file}")
    folder = arguments.out or arguments.file.parent / "minimized"
    minimized = minimize_file(
        arguments.file, folder, arguments.after, arguments.level, arguments.backend, arguments.ranks
    )
    print(minimized)
    sys.exit(0 if minimized.path is not None else DOES_NOT_FAIL)


if __name__ == "__main__":
    main()
