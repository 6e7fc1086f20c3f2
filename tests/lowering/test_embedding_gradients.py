"""Gradients of tables: traced for a GPU and computed here, they are torch's, and take few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import gradsplit
from gradsplit.compile_core.autograd.rewrites.simplify import simplify
from gradsplit.compile_core.ir.loops import LoopNest, Reduce, combined_buffers
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.decompositions import embedding_gradients
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, check, compare, compute_of, nests, trace

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_gradients, "_DEVICE_TYPE", "cpu")


def gradients(rows: Tensor, indices: Tensor, count: int, padding: int = -1) -> Tensor:
    return aten.embedding_dense_backward.default(rows, indices, count, padding, False)


INDICES = torch.tensor([[0, 3, 3, 1], [2, 3, 0, 0]])
ROWS = torch.arange(24.0).view(2, 4, 3)


@pytest.mark.parametrize("padding", [-1, 3])
def test_rows_are_added_in_place(padding: int) -> None:
    program = check(lambda rows, indices: gradients(rows, indices, 11, padding), ROWS, INDICES)
    assert not calls(program)
    assert [combined_buffers(nest) for nest in nests(program)] == [set(), {"index_add"}]


@pytest.mark.parametrize("count", [4, 1])
def test_tables_of_few_rows_are_sums(count: int) -> None:
    program = check(lambda rows, indices: gradients(rows, indices, count, 0), ROWS, INDICES % count)
    assert not calls(program)
    assert any(isinstance(s, Reduce) for nest in nests(program) for s in nest.body)


@pytest.mark.parametrize(("places", "is_sum"), [(6 * 256, True), (6 * 255, False)])
def test_tables_of_few_numbers_are_sums_where_many_are_added(places: int, is_sum: bool) -> None:
    rows, indices = torch.randn(places, 3), torch.randint(6, (places,))
    program = check(lambda rows, indices: gradients(rows, indices, 6), rows, indices)
    assert any(isinstance(s, Reduce) for nest in nests(program) for s in nest.body) == is_sum


def test_narrow_floats_and_frequencies_stay_with_torch() -> None:
    program = check(lambda rows, indices: gradients(rows, indices, 11), ROWS.bfloat16(), INDICES)
    assert [call.target for call in calls(program)] == [aten.embedding_dense_backward.default]


def test_a_tied_table() -> None:
    """Rows are added to the gradient of the head, as a kernel wrote it."""

    def tied(rows: Tensor, indices: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return (left @ right).float() + gradients(rows, indices, 11)

    inputs = (ROWS, INDICES, torch.randn(11, 5).bfloat16(), torch.randn(5, 3).bfloat16())
    program = fuse(lower(compute_of(simplify(trace(tied, *inputs)))))
    verify_program(program)
    compare(evaluate(program, inputs), [tied(*inputs)], 1e-2)
    assert [call.target for call in calls(program)] == [aten.mm.out]
    assert len(nests(program)) == 2, "zeros are not written, nor is a sum"


def _added_twice(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    added = torch.zeros(4).index_add(0, places, x)
    return x[:4] + added, added


def _not_from_zeros(x: Tensor, places: Tensor) -> Tensor:
    return x[:4] + torch.ones(4).index_add(0, places, x)


def _broadcast(x: Tensor, places: Tensor) -> Tensor:
    return x[:4].view(4, 1) + torch.zeros(4).index_add(0, places, x)


def _both(x: Tensor, places: Tensor) -> Tensor:
    return torch.zeros(4).index_add(0, places, x) + torch.zeros(4).index_add(0, places, x.sin())


def _scaled(x: Tensor, places: Tensor) -> Tensor:
    return x[:4].exp() + torch.zeros(4).index_add(0, places, x, alpha=2)


@pytest.mark.parametrize("program", [_added_twice, _not_from_zeros, _broadcast, _both, _scaled])
def test_sums_with_what_was_added_to_zeros(program: Callable[..., Any]) -> None:
    x, places = torch.randn(6), torch.tensor([0, 3, 3, 1, 0, 2])
    graph = simplify(trace(program, x, places))
    for mine, theirs in zip(graph(x, places), tree_leaves(program(x, places)), strict=True):
        torch.testing.assert_close(mine, theirs)
    check(program, x, places)
    sums = len(graph.graph.find_nodes(op="call_function", target=aten.add.Tensor))
    assert sums == (0 if program in (_both, _scaled) else 1)


def test_what_is_changed_is_a_copy() -> None:
    def program(x: Tensor, places: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        doubled = table * 2
        return (
            doubled.index_add(0, places, x),
            doubled.index_put((places,), x, accumulate=True),
            table.scatter_add(0, places, x),
            doubled,
        )

    x, places = torch.randn(6), torch.tensor([0, 3, 3, 1, 0, 2])
    copies = [nest for nest in nests(check(program, x, places, torch.randn(4))) if isinstance(nest, LoopNest)]
    assert copies
    complex_table = torch.randn(4, dtype=torch.complex64)
    check(
        lambda x, places, table: table.index_add(0, places, x), x.to(torch.complex64), places, complex_table
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 50])
def test_on_a_gpu(count: int) -> None:
    indices = torch.randint(0, count, (64, 128), device="cuda")
    exact = torch.randn(count, 96, device="cuda", dtype=torch.float64).requires_grad_()
    table = exact.detach().float().requires_grad_()

    def program(table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(indices, table).square().sum()

    program(exact).backward()
    gradsplit.compile(program)(table).backward()
    assert table.grad is not None and exact.grad is not None
    torch.testing.assert_close(table.grad.double(), exact.grad, rtol=1e-4, atol=1e-3)
