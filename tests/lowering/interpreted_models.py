"""Trains small models for a step, every kernel that a GPU would run in Triton's interpreter against the evaluator.

Run by ``test_model_kernels.py`` in a process of its own: the interpreter is chosen by an environment variable before
Triton is imported. Equal kernels are run once; they are written to a file.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.backends.generated_kernels import generate_region
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram, Step
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph
from tests.lowering.interpreted_kernels import interpreted
from tests.lowering.loop_evaluator import Buffers, Noise, allocate, evaluate, flat, run_step
from tests.lowering.move_graph import on_gpu
from tests.lowering.product_programs import on
from tests.lowering.random_expressions import error_bound
from tests.lowering.small_models import MODELS

_ROUNDED_RUNS = 3


@dataclass
class KernelCheck:
    """A backend that generates Triton, and runs each region by the evaluator and each kernel once by the interpreter.

    Attributes:
        kernels: those that were run, by all that makes a kernel what it is but its name.
        wrong: what is wrong with them.
    """

    folder: Path
    kernels: dict[Any, KernelSource] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def compile_region(
        self, compute: Compute, options: CompileOptions, dump: StageDump
    ) -> Callable[[], Callable[[list[torch.Tensor]], Sequence[Any]]]:
        moved = replace(compute, module=on_gpu(copy_module(compute.module)))
        generated, sources = generate_region(moved, options, dump)
        program = on(torch.device("cpu"), generated)
        run = functools.partial(self._run_step, {source.name: source for source in sources})
        return lambda: lambda arguments: evaluate(program, arguments, run=run)

    def _run_step(
        self,
        sources: Mapping[str, KernelSource],
        step: Step,
        buffers: Buffers,
        program: LoopProgram,
    ) -> None:
        if isinstance(step, ExternCall):
            return run_step(step, buffers, program)
        source = sources[step.name]
        key = replace(source, name="", buffers=(), bases=())
        for name in reads(step) | writes(step):
            allocate(buffers, program, name)
        if key in self.kernels:
            return run_step(step, buffers, program)
        self.kernels[key] = source
        before = {name: flat(buffers[name]).clone() for name in source.buffers}
        rounded_runs = []
        for seed in range(_ROUNDED_RUNS):
            rounded_runs.append(_views(before, buffers))
            run_step(step, rounded_runs[-1], program, _noise(seed))
        found = _views(before, buffers)
        run_step(step, buffers, program)
        interpreted(source, self.folder)(*(found[name] for name in source.buffers))
        for name in source.buffers:
            expected = flat(buffers[name])
            others = [flat(run[name]) for run in rounded_runs]
            mine = flat(found[name])
            same = (mine == expected) | (mine.isnan() & expected.isnan())
            same |= (mine.double() - expected.double()).abs() <= error_bound(expected, others)
            if not same.all():
                at = int((~same).nonzero()[0])
                self.wrong.append(
                    f"{step.name}: {name}[{at}] is {mine[at]}, not {expected[at]}\n{source.text}"
                )
        return None


def _views(memory: Mapping[str, torch.Tensor], buffers: Buffers) -> Buffers:
    """Copies of buffers, of other contents."""
    return {
        name: torch.as_strided(contents.clone(), buffers[name].shape, buffers[name].stride())
        for name, contents in memory.items()
    }


def _noise(seed: int) -> Noise:
    generator = torch.Generator().manual_seed(seed)

    def noisy(value: torch.Tensor) -> torch.Tensor:
        if not value.dtype.is_floating_point:
            return value
        units = torch.randint(-2, 3, value.shape, generator=generator)
        return torch.where(value.isfinite(), value * (1 + units * torch.finfo(value.dtype).eps), value)

    return noisy


def check(name: str, checked: KernelCheck) -> None:
    """Runs a step of a model, with bfloat16 where autocast has it."""
    torch.manual_seed(0)
    backend = RegionBackend(
        "checked", checked.compile_region, lambda *_: decomposition_table("cuda"), makes_random_numbers=True
    )
    options = CompileOptions(cache_folder=checked.folder, verify=True)
    function, arguments = MODELS[name]()
    compiled = CompiledFunction(
        function, functools.partial(compile_graph, backend=backend, options=options), fullgraph=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(**arguments)
    if loss is not None:
        loss.backward()
    print(f"{name}: {len(checked.kernels)} kernels so far")
    # An exception in a region would make the program run without it.
    assert not checked.wrong, "\n\n".join(checked.wrong)


def main(folder: Path) -> None:
    checked = KernelCheck(folder)
    for name in MODELS:
        check(name, checked)
    (folder / "kernels.pickle").write_bytes(pickle.dumps(list(checked.kernels.values())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
