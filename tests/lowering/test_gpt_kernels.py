"""Every kernel of the example's GPT, checked without a GPU: in Triton's interpreter, and compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_core.autograd.partition import partition
from compile_core.autograd.trace_joint import trace_joint
from compile_core.compiled_function import CompiledFunction
from compile_core.ir.loops import LoopNest
from compile_core.ir.regions import whole_schedule
from compile_core.lowering.build_triton import compile_triton_for
from compile_core.lowering.codegen_triton import generate_triton
from compile_core.lowering.decompositions import decomposition_table
from compile_core.lowering.fuse import fuse
from compile_core.lowering.lower import lower
from examples.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[2]


def test_a_training_step_in_the_interpreter(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.lowering.interpreted_gpt", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-5000:]
    assert "forward" in run.stdout and "backward" in run.stdout


@pytest.mark.parametrize("program", ["forward", "backward"])
def test_kernels_compile_for_sm_90(program: str, tmp_path: Path) -> None:
    """At the example's own sizes; two layers, because further ones repeat the second's kernels."""
    for nest, buffers in gpt_nests(program):
        kernel = compile_triton_for(generate_triton(nest, buffers), ("cuda", 90, 32), tmp_path)
        assert kernel.asm["ptx"], nest.name


def gpt_nests(program: str) -> list[tuple[LoopNest, dict]]:
    captured = []
    model = GPT(GPTConfig(layers=2))
    tokens, targets = torch.randint(0, 256, (2, 8, 128))
    CompiledFunction(model, lambda graph, _: captured.append(graph) or graph.module)(tokens, targets)
    examples = [entry.example for entry in captured[0].inputs]
    graph = partition(trace_joint(captured[0].module, examples, decomposition_table("cuda")))
    module = graph.forward if program == "forward" else graph.backward
    assert module is not None
    (compute,) = whole_schedule(program, module).computes
    lowered = fuse(lower(compute))
    return [(step, dict(lowered.buffers)) for step in lowered.steps if isinstance(step, LoopNest)]
