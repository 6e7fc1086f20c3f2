"""Compiling takes time in proportion to the program: lines of Python are counted, as no clock could be trusted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsplit
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.backends.generated_kernels import generate_region
from gradsplit.compile_core.ir.graphs import replaced_inputs
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion import pieces
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import parse_options
from gradsplit.compile_core.runtime.instructions import instructions_of
from tests.autograd.compare_with_eager import captured, fakes
from tests.bench.large_programs import PROGRAMS

# Twice the program may take so many times the lines.
_MOST_GROWTH = 2.2


def lines_run(call: Callable[[], Any]) -> int:
    """How many lines of the compiler and of what it asks about graphs run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        if event == "call" and not any(
            name in frame.f_code.co_filename for name in ("compile_core", "networkx")
        ):
            return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def residuals(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Products with a pointwise operation and a residual, and the same scale in each."""

    def program(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        for _ in range(count):
            x = x + (torch.mm(x, weight) * scale).tanh()
        return x

    return program, [
        torch.randn(4, 8),
        torch.randn(8, 8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    ]


def parameters(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Inputs that are changed and nothing else."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(count)]
    for x in inputs:
        graph.call_method("mul_", (x, 0.9))
    graph.output((graph.call_method("sin", (inputs[0],)),))
    return torch.fx.GraphModule({}, graph), [torch.randn(8) for _ in range(count)]


def stages(program: Callable[..., Any], inputs: list[Tensor]) -> dict[str, int]:
    """The lines that each stage takes for a program."""
    module, examples = captured(program), fakes(inputs)
    options, made = parse_options(None, {}), dict[str, Any]()

    def traced() -> None:
        made["joint"] = trace_joint(module, examples, decomposition_table("cpu"))

    def parted() -> None:
        made["graph"] = partition(made["joint"])

    def lowered() -> None:
        graph = made["graph"]
        replaced = replaced_inputs(graph.signature)
        schedules = [whole_schedule("forward", graph.forward, replaced, graph.num_outputs)]
        if graph.backward is not None:
            schedules.append(whole_schedule("backward", graph.backward))
        computes = [compute for schedule in schedules for compute in schedule.computes]
        made["programs"] = [
            generate_region(compute, options, StageDump(None, None))[0] for compute in computes
        ]

    def placed() -> None:
        for program in made["programs"]:
            instructions_of(program, False)

    return {stage.__name__: lines_run(stage) for stage in (traced, parted, lowered, placed)}


@pytest.mark.parametrize("kind", [residuals, parameters])
def test_stages_take_as_many_lines_as_the_program_is_long(
    kind: Callable[[int], tuple[Callable[..., Any], list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pieces, "_MOST_STEPS", 32
    )  # long programs are several pieces, and here these are long
    stages(*kind(2))
    small, large = stages(*kind(20)), stages(*kind(40))
    grown = {stage: large[stage] / small[stage] for stage in small}
    assert max(grown.values()) <= _MOST_GROWTH, grown


@pytest.mark.parametrize(("kind", "size"), [("layers with norm", 40), ("breaks in a block", 400)])
def test_capture_takes_as_many_lines_as_the_program_is_long(kind: str, size: int) -> None:
    def lines(size: int) -> int:
        program = PROGRAMS[kind](size)
        compiled = gradsplit.compile(program.function, backend="eager")
        return lines_run(lambda: compiled(*program.arguments))

    lines(size // 5)
    small, large = lines(size), lines(2 * size)
    assert large <= _MOST_GROWTH * small
