"""Indices that tensors hold: ``x[i, j]`` with tensors without dims is an item of the graph, and a store to one, too."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from tests.capture.same_as_plain import check_same


def items(x, i, j, t):
    return (
        x[i] + 1, x[i, :, j] + 1, x[t, :, j], x[:, t, j], x[..., i] * 2, x[None, i, 1] + 1, x[-1 - i * 0, ..., 1:3] + 1,
        x[j][t] + 1, x[i, j, 1] * x.sum(),
    )  # fmt: skip


def stores(x, i, j, t):
    y = x * 2
    y[i, :, j] = 3
    y[i] = x[0]
    y[..., j] = 1.5
    y[1, None, i] = x[1, 0]
    y[:, i, 1:3] = 4.0
    y[i, j, i] = x[0, 0, 0].double()
    return y


def counts_up(x, i, j, t):
    y = torch.zeros(3, 4, 5)
    y[i] += 1
    return y * x


def item_of_a_result(x, i, j, t):
    return (x * 2)[i], x[x.sum((1, 2)).argmax()] + 1


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("program", [items, stores, counts_up, item_of_a_result])
def test_numbers_in_tensors_are_indices_of_one_graph(program, backend) -> None:
    def arguments():
        x = torch.randn(3, 4, 5, requires_grad=True)
        return x, torch.tensor(-1), torch.tensor(1, dtype=torch.int16), torch.tensor([0, 1, -1])

    check_same(program, arguments, backend=backend)


def stores_another_dtype(x, i):
    y = x.clone()
    y[i] = 3.7
    y[0, i] = True
    return y


def test_what_is_stored_takes_the_dtype() -> None:
    check_same(stores_another_dtype, lambda: (torch.arange(12).reshape(3, 4), torch.tensor(2)))


def returned(x, i):
    return x[i], x + 1


def changed(x, i):
    y = x * 2
    z = y[i]
    z.mul_(3)
    return y


def changed_below(x, i):
    y = x * 2
    z = y[i]
    y.mul_(3)
    return z + 1


def changed_through_data(x, i):
    z = x[i]
    x.data.mul_(3)
    return z + 1


def made_without_gradients(x, i):
    y = x * 2
    with torch.no_grad():
        z = y[i]
    return z, z.requires_grad


def read_before_it_is_stored(x, i):
    y = x * 2
    z = y[i]
    z += 1
    seen = y * 2
    y[i] = z
    return y, seen


@pytest.mark.parametrize(
    "program",
    [
        returned,
        changed,
        changed_below,
        changed_through_data,
        made_without_gradients,
        read_before_it_is_stored,
    ],
)
def test_where_a_view_is_more_than_read_plain_python_makes_it(program) -> None:
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True), torch.tensor(1)), fullgraph=False)


def test_a_returned_item_is_a_view_of_what_was_given() -> None:
    x, compiled = torch.zeros(3, 4), gradsplit.compile(returned, backend="eager")
    item, _ = compiled(x, torch.tensor(1))
    item.fill_(1)
    assert x.sum() == 4


def test_an_index_outside_raises_what_plain_python_raises() -> None:
    compiled = gradsplit.compile(lambda x, i: x[i] * 2, backend="eager")
    compiled(torch.ones(3), torch.tensor(1))
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.ones(3), torch.tensor(5))
