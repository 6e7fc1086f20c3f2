"""Trains a small GPT for a step with every generated kernel in Triton's interpreter, and compares with eager.

Run by ``test_gpt_kernels.py`` in a process of its own: the interpreter is chosen by an environment variable before
Triton is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from compile_core.backends import triton
from compile_core.backends.registry import RegionBackend
from compile_core.compiled_function import CompiledFunction
from compile_core.ir.loops import LoopNest
from compile_core.ir.schedule import Compute
from compile_core.lowering.codegen_triton import generate_triton
from compile_core.lowering.fuse import fuse
from compile_core.lowering.lower import lower
from compile_core.observe.dump import StageDump
from compile_core.options import CompileOptions
from compile_core.pipeline import compile_graph
from compile_core.runtime.link_program import LinkedProgram
from examples.gpt import GPT, GPTConfig
from tests.lowering.interpreted_kernels import link_interpreted

CONFIG = GPTConfig(vocabulary=48, context=16, layers=2, heads=2, width=32)


def compile_region(compute: Compute, options: CompileOptions, dump: StageDump) -> Callable[[], LinkedProgram]:
    """The default backend's stages, but Triton for CPU tensors, run by the interpreter."""
    program = fuse(lower(compute))
    nests = [step for step in program.steps if isinstance(step, LoopNest)]
    sources = [generate_triton(nest, program.buffers) for nest in nests]
    print(f"{compute.name}: {len(sources)} kernels")
    return lambda: link_interpreted(program, sources, options.cache_folder)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    tokens, targets = torch.randint(0, CONFIG.vocabulary, (2, 3, CONFIG.context))
    backend = RegionBackend("interpreted", compile_region, triton.decompositions)
    compile_it = functools.partial(
        compile_graph, backend=backend, options=CompileOptions(cache_folder=folder)
    )
    compiled = CompiledFunction(model, compile_it, fullgraph=True)

    model(tokens, targets).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = compiled(tokens, targets)
    torch.testing.assert_close(loss, model(tokens, targets), rtol=1e-5, atol=1e-6)
    loss.backward()
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"gradient of {name} differs by {error:.1e}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
