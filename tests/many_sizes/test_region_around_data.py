"""A region with sizes that depend on data, cut into what torch's kernels run and what is compiled around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradsplit
from gradsplit.compile_core import config
from gradsplit.compile_core.ir.data_checks import CHECK
from gradsplit.compile_core.ir.verify_graphs import verify_schedule
from gradsplit.compile_core.many_sizes.region_around_data import has_data_sizes, split_at_data
from gradsplit.compile_core.pipeline import CompiledGraph

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def data_in_graphs():
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def compiled_of(function: Any, *arguments: Any, **options: Any) -> CompiledGraph:
    made = gradsplit.compile(function, fullgraph=True, **options)
    made(*arguments)
    compiled = made.entries[0].compiled
    assert isinstance(compiled, CompiledGraph)
    return compiled


def mixture(x, router, experts):
    """Experts between what comes before and behind them."""
    hidden = (x.sin() * 2).tanh()
    choice = (hidden @ router).argmax(-1)
    mixed = torch.zeros_like(hidden)
    for position, expert in enumerate(experts):
        (rows,) = torch.where(choice == position)
        mixed.index_add_(0, rows, F.silu(hidden[rows] @ expert))
    return (mixed.cos() + x).sigmoid()


def parts_of(program: Any) -> tuple[list[Any], list[bool]]:
    (compute,) = program.schedule.computes
    schedule, apart = split_at_data(compute)
    verify_schedule(schedule)
    return list(schedule.computes), [part.name in apart for part in schedule.computes]


def test_a_mixture_is_three_regions() -> None:
    x = torch.randn(8, 4, requires_grad=True)
    router, experts = torch.randn(4, 3), torch.randn(3, 4, 4, requires_grad=True)
    compiled = compiled_of(mixture, x, router, experts)
    for program in (compiled.forward, compiled.backward):
        parts, apart = parts_of(program)
        assert apart in ([False, True, False], [False, True])
        for part, is_apart in zip(parts, apart, strict=True):
            assert has_data_sizes(part.module) == is_apart
    forward, _ = parts_of(compiled.forward)
    targets = [{node.target for node in part.module.graph.nodes} for part in forward]
    assert aten.sin.default in targets[0] and aten.nonzero.default in targets[1]
    assert aten.cos.default in targets[2]


def test_checks_are_computed_apart_and_kept() -> None:
    def program(x):
        chosen = x[x > 0]
        torch._check(chosen.shape[0] < 4)
        return x.sin() * 2

    compiled = compiled_of(program, torch.linspace(-9, 2, 8, requires_grad=True))
    parts, apart = parts_of(compiled.forward)
    checks = [any(node.target is CHECK for node in part.module.graph.nodes) for part in parts]
    assert any(checks) and checks == apart


def test_open_sizes_are_read_where_they_are_needed() -> None:
    def program(x):
        return (x[x > 0] * x.shape[0]).sum() + torch.arange(x.shape[0] * 2).sum() * x.sin()

    made = gradsplit.compile(program, fullgraph=True, dynamic=True)
    for size in (5, 9, 4):
        x = torch.linspace(-1, 2, size)
        torch.testing.assert_close(made(x), program(x))
    assert len(made.entries) == 1


def test_random_numbers_are_drawn_in_their_order() -> None:
    def program(x):
        return F.dropout(x[x > 0]), F.dropout(x.sin()), torch.rand_like(x[x > 0])

    x = torch.linspace(-1, 2, 9)
    torch.manual_seed(0)
    expected = program(x)
    made = gradsplit.compile(program, fullgraph=True, options={"fallback_random": True})
    for _ in range(2):
        torch.manual_seed(0)
        torch.testing.assert_close(made(x), expected)


def test_random_numbers_of_the_kernels_have_their_distribution() -> None:
    made = gradsplit.compile(lambda x: F.dropout(x[x > 0], 0.25), fullgraph=True)
    found = made(torch.ones(4000))
    assert found.shape == (4000,) and found.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert 0.7 < (found > 0).float().mean() < 0.8


def test_a_changed_input_has_its_new_value_only_where_no_check_fails() -> None:
    def program(x, counts):
        added = x[x > 0] + torch.arange(3.0)
        counts.add_(1)
        return added

    made = gradsplit.compile(program, fullgraph=True)
    for data in ([1.0, 2.0, 3.0], [-1.0, 2.0, -3.0]):
        counts, expected = torch.zeros(1), torch.zeros(1)
        torch.testing.assert_close(made(torch.tensor(data), counts), program(torch.tensor(data), expected))
        assert counts == expected == 1
