"""Graphs that compute on the CPU and on a GPU, as eager operators allow it: no kernel has memory of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.loops import LoopNest, LoopProgram
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, compute_of, trace
from tests.lowering.move_graph import GPU, on_gpu
from tests.lowering.product_programs import on

aten = torch.ops.aten


INPUTS = (
    torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
    torch.tensor([2, 0]),
    torch.tensor(1.5),
)


def _graph(program: Callable[..., Any]) -> torch.fx.GraphModule:
    """``x`` and what is computed of it are on a GPU; two rows' numbers and one number are on the CPU."""
    module = trace(program, *INPUTS)
    first, *_ = module.graph.find_nodes(op="placeholder")
    moved: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if node is first or not moved.isdisjoint(node.all_input_nodes):
            moved.add(node)
    return on_gpu(module, moved)


def _lowered(program: Callable[..., Any]) -> LoopProgram:
    lowered = lower(compute_of(_graph(program)))
    verify_program(lowered)
    fused = batch_nests(fuse(lowered))
    verify_program(fused)
    for step in (*lowered.steps, *fused.steps):
        if isinstance(step, LoopNest):
            devices = {
                fused.buffers.get(name, lowered.buffers[name]).device for name in reads(step) | writes(step)
            }
            assert len(devices) == 1, f"{step.name}: {devices}"
    found, expected = evaluate(on(torch.device("cpu"), fused), INPUTS), tree_leaves(program(*INPUTS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return fused


def _put(x: Tensor, rows: Tensor, accumulate: bool) -> Tensor:
    return torch.index_put(x, (rows,), x[:2] * 2, accumulate=accumulate)


def _copied_into(x: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[:2] = values[:, None].float()
    return x


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "rows": lambda x, rows, number: x[rows] + 1,
    "computed rows": lambda x, rows, number: x[(rows + 1) % 3].exp(),
    "rows of a view": lambda x, rows, number: x.t()[:, rows] * 2,
    "put": lambda x, rows, number: _put(x, rows, False) + 1,
    "added": lambda x, rows, number: _put(x, rows, True) + 1,
    "put number": lambda x, rows, number: torch.index_put(x, (rows,), number) + 1,
    "number": lambda x, rows, number: x * number + number.exp(),
    "mask": lambda x, rows, number: torch.where(x > number, x, number * 2).sum(),
    "fill": lambda x, rows, number: x.masked_fill(x > 0, number),
    "copy": lambda x, rows, number: _copied_into(x, rows),
    "range": lambda x, rows, number: x[torch.arange(3), torch.arange(3)] * 2,
    "computed range": lambda x, rows, number: x[(torch.arange(4) + 1).remainder(3)[:3], torch.arange(3)] * 2,
    "range beside": lambda x, rows, number: (x[(view := torch.arange(6).view(2, 3))[1] - 3], view, view + 1),
    "constant": lambda x, rows, number: x[torch.tensor([1, 0, 1])] + torch.tensor(2.0),
    "siblings": lambda x, rows, number: (x.sum() + 1, number + 1, (x * 2).sum(), number * 3),
    "sibling ranges": lambda x, rows, number: (x[0, :2] + 1, rows + 1, rows.float() * 2, x[1, :2] * 2),
    "transposed": lambda x, rows, number: x.t()[torch.tensor([[0, 1], [2, 0]]).t()].exp(),
    "moved": lambda x, rows, number: (
        x + rows.float()[:, None].expand(2, 3).t()[:, :1].to(x.device).sum(),
        rows + 1,
    ),
    "shape": lambda x, rows, number: rows.new_zeros(4, 3) + 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_kernel_is_on_one_device(name: str) -> None:
    _lowered(PROGRAMS[name])


def test_what_takes_no_memory_is_not_copied() -> None:
    for name in ("range", "computed range"):
        assert not calls(_lowered(PROGRAMS[name]))


def test_copies_are_made_once() -> None:
    (copy,) = calls(_lowered(lambda x, rows, number: (x[rows] + 1, (x * 2)[:, rows].sum(0))))
    assert copy.target is aten._to_copy.default and copy.keywords["device"] == GPU
