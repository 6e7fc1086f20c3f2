"""Traces a function, lowers and fuses it, evaluates both programs and compares with running the graph by
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, LoopProgram, Step
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.move_graph import on_gpu

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def trace(
    function: Callable[..., Any], *inputs: Any, decompose: bool = True, device_type: str = "cpu"
) -> torch.fx.GraphModule:
    """A functional ATen graph of ``function``, its output a flat tuple; for ``"cuda"`` as it would be on a GPU."""

    def flat(*arguments: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(torch.func.functionalize(function)(*arguments))

    table = decomposition_table(device_type) if decompose else {}
    module = make_fx(flat, decomposition_table=table, tracing_mode="fake")(*inputs)
    return module if device_type == "cpu" else on_gpu(module)


def trace_joint(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    """Like ``trace``, for functions that call autograd; autograd's formulas are functional already."""

    def flat(*arguments: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(function(*arguments))

    return make_fx(flat, decomposition_table=decomposition_table("cpu"), tracing_mode="fake")(*inputs)


def compute_of(
    module: torch.fx.GraphModule,
    destinations: dict[str, str] | None = None,
    strides: dict[str, tuple[int, ...]] | None = None,
) -> Compute:
    results = module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    inputs = tuple(node.name for node in module.graph.nodes if node.op == "placeholder")
    outputs = tuple(f"result_{position}" for position in range(len(results)))
    return Compute("program", module, inputs, outputs, destinations or {}, strides or {})


def nests(program: LoopProgram) -> list[LoopNest]:
    return [step for step in program.steps if isinstance(step, LoopNest)]


def kernels(program: LoopProgram) -> list[Step]:
    """What is generated for the program, nests that are alike together."""
    return [step for step in batch_nests(program).steps if not isinstance(step, ExternCall)]


def calls(program: LoopProgram) -> list[ExternCall]:
    return [step for step in program.steps if isinstance(step, ExternCall)]


def compare(actual: Sequence[Any], expected: Sequence[Any], tolerance: float | None = None) -> None:
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        if theirs is None:
            assert mine is None
            continue
        allowed = TOLERANCE.get(theirs.dtype, 0.0) if tolerance is None else tolerance
        torch.testing.assert_close(mine, theirs.detach(), rtol=allowed, atol=allowed, equal_nan=True)
        steps = zip(theirs.shape, mine.stride(), theirs.stride(), strict=True)
        assert not theirs.numel() or all(size == 1 or own == eager for size, own, eager in steps)


def check(
    function: Callable[..., Any], *inputs: Any, decompose: bool = True, tolerance: float | None = None
) -> LoopProgram:
    """Asserts that lowering and fusing keep what ``function`` computes; returns the fused program.

    The fusion must not even change rounding, so both programs' results are compared bit for bit.
    """
    module = trace(function, *inputs, decompose=decompose)
    return check_module(module, inputs, tolerance)


def check_module(
    module: torch.fx.GraphModule, inputs: Sequence[Any], tolerance: float | None = None
) -> LoopProgram:
    tensors = [leaf.detach() for leaf in torch.utils._pytree.tree_leaves(inputs)]
    with torch.no_grad():
        expected = module(*inputs)
    lowered = lower(compute_of(module))
    verify_program(lowered)
    fused = fuse(lowered)
    verify_program(fused)
    before, after = evaluate(lowered, tensors), evaluate(fused, tensors)
    compare(before, expected, tolerance)
    batched = batch_nests(fused)
    verify_program(batched)
    at_last = evaluate(batched, tensors) if batched is not fused else after
    for one, other, last in zip(before, after, at_last, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(last, other, rtol=0, atol=0, equal_nan=True)
    return fused
