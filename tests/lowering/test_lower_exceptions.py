"""Where torch's kernels raise, compiled programs raise too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradsplit

DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "truncate": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": torch.fmod,
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division_by_zero(name: str) -> None:
    compiled = gradsplit.compile(DIVISIONS[name], fullgraph=True)
    a, b = torch.arange(-4, 4), torch.tensor([1, 2, 3, -4, 5, -6, 7, 8])
    assert torch.equal(compiled(a, b), DIVISIONS[name](a, b))
    b[3] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(a, b)


def test_an_index_out_of_range() -> None:
    compiled = gradsplit.compile(lambda table, index: table[index] * 2, fullgraph=True)
    table = torch.randn(4, 3)
    assert torch.equal(compiled(table, torch.tensor([0, 3, -1])), table[[0, 3, -1]] * 2)
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([0, 4, 1]))


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "beginning": lambda x: x[:3],
    "end": lambda x: x[2:],
    "every second": lambda x: x[::2],
    "part": lambda x: x.split([1, 4])[1],
    "diagonal": lambda x: x.diagonal(1),
    "transposed": lambda x: x.t(),
    "window": lambda x: x.unfold(0, 2, 1),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(2, 0),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 0, 2, 3)),
    "written to": lambda x: torch.slice_scatter(x, x[:2], 0, 1, 3),
    "overwritten": lambda x: x.copy_(x[1].clone()),
    "repeated": lambda x: x[1].expand(5, 4),
    "single": lambda x: x[2:3],
    "constant": lambda x: torch.full_like(x, 3.0),
    "counted": lambda x: torch.arange(5.0),
    "masked": lambda x: torch.where(torch.arange(5)[:, None] > 7, x, 0.0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_an_index_into_what_is_computed(name: str) -> None:
    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return COMPUTED[name](table * 2)[index]

    table = torch.randn(5, 4)
    length = len(COMPUTED[name](table))
    compiled = gradsplit.compile(program, fullgraph=True)
    inside = torch.tensor([0, length - 1, -1, -length])
    assert torch.equal(compiled(table, inside), program(table, inside))
    for outside in (length, -length - 1, 99, -99):
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([0, outside, 0, 0]))


READERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, index: x.gather(0, index[:, None]),
    "index_select": lambda x, index: x.index_select(0, index),
    "embedding": lambda x, index: torch.nn.functional.embedding(index, x),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x * 2, lambda x: x.flip(0)])
def test_operators_that_count_no_index_from_the_end(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return READERS[name](change(table), index)

    table, inside = torch.randn(5, 4), torch.tensor([0, 4, 2])
    compiled = gradsplit.compile(program, fullgraph=True)
    assert torch.equal(compiled(table, inside), program(table, inside))
    for outside in (-1, 5, 99):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            compiled(table, torch.tensor([0, outside, 0]))


def test_an_index_into_nothing() -> None:
    compiled = gradsplit.compile(lambda table, index: (table * 2)[index], fullgraph=True)
    assert compiled(torch.zeros(0, 3), torch.tensor([], dtype=torch.int64)).shape == (0, 3)
    with pytest.raises(IndexError):
        compiled(torch.zeros(0, 3), torch.tensor([0]))


def test_an_index_into_what_is_padded_behind() -> None:
    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(table * 2, (0, 3))[index]

    table, index = torch.randn(5), torch.tensor([0, 7, -1, -4, -8])
    assert torch.equal(gradsplit.compile(program, fullgraph=True)(table, index), program(table, index))
