"""What a backward costs, against what the lowering makes of it and against hand counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.regions import graph_results, whole_schedule
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.runtime.instructions import Allocate, Free, instructions_of
from gradsplit.distributed.planning.backward_costs import GPU_RATES, OrderCosts, node_facts
from tests.distributed.planning.recorded_backwards import recorded

_WIDTH, _ROWS = 512, 2048


def blocks(
    a0: Tensor, b0: Tensor, n0: Tensor, a1: Tensor, b1: Tensor, n1: Tensor, a2: Tensor, b2: Tensor, n2: Tensor,
    x: Tensor,
) -> Tensor:  # fmt: skip
    """Three blocks with a norm, two products in 16 bits and a residual branch, and a head that is its own input."""
    rows = x * 2
    for wide, narrow, norm in ((a0, b0, n0), (a1, b1, n1), (a2, b2, n2)):
        normed = F.layer_norm(rows, (_WIDTH,), norm).bfloat16()
        inner = F.gelu(F.linear(normed, wide.bfloat16()), approximate="tanh")
        rows = rows + F.linear(inner, narrow.bfloat16()).float()
    return F.linear(rows.bfloat16(), x.bfloat16()).float()


def backward() -> tuple[GraphModule, OrderCosts]:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(3):
        shapes |= {f"a{k}": (4 * _WIDTH, _WIDTH), f"b{k}": (_WIDTH, 4 * _WIDTH), f"n{k}": (_WIDTH,)}
    module, _ = recorded(blocks, **shapes, x=(_ROWS, _WIDTH))
    order = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    returned = [node for node in graph_results(module) if node is not None]
    return module, OrderCosts(order, node_facts(module.graph.nodes, GPU_RATES), [], returned)


def allocated_peak(program: LoopProgram) -> int:
    """The most that is alive while a program runs, whose inputs nobody else holds."""
    instructions = instructions_of(program, kernels_take_addresses=True)
    sizes = {**program.buffers, **instructions.buffers}
    alive = set(program.inputs)
    most = 0
    for step in instructions.steps:
        if isinstance(step, Allocate):
            alive.add(step.buffer)
        elif isinstance(step, Free):
            alive -= set(step.buffers)
        most = max(most, sum(sizes[name].bytes for name in alive))
    return most


def test_peak_is_that_of_the_lowered_program() -> None:
    module, costs = backward()
    (compute,) = whole_schedule("backward", module).computes
    program = fuse(lower(compute))
    peak = allocated_peak(program)
    assert abs(max(costs.live_bytes()) - peak) < 0.05 * peak


def test_times_follow_from_what_products_compute_and_kernels_move() -> None:
    module, costs = backward()
    (compute,) = whole_schedule("backward", module).computes
    program = fuse(lower(compute))
    moved = sum(
        program.buffers[name].bytes
        for step in program.steps
        if not isinstance(step, ExternCall)
        for name in reads(step) | writes(step)
    )
    times = costs.seconds(GPU_RATES)
    fused_s = sum(
        took_s for node, took_s in zip(costs.order, times, strict=True) if costs.facts[node].kind == "fused"
    )
    assert abs(fused_s * GPU_RATES.bytes_per_s - moved) < 0.25 * moved
    products = [
        took_s
        for node, took_s in zip(costs.order, times, strict=True)
        if node.target is torch.ops.aten.mm.default
    ]
    operations = 2 * _ROWS * _WIDTH * 4 * _WIDTH * 12 + 2 * _ROWS * _WIDTH * _ROWS * 2
    expected_s = operations / GPU_RATES.narrow_per_s + len(products) * GPU_RATES.start_s
    assert expected_s <= sum(products) < 1.5 * expected_s
