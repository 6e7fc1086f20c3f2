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


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "beginning": lambda x: x[:3],
    "end": lambda x: x[2:],
    "every second": lambda x: x[::2],
    "part": lambda x: x.split([1, 4])[1],
    "diagonal": lambda x: x.diagonal(1),
    "transposed": lambda x: x.t(),
    "window": lambda x: x.unfold(0, 2, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_index_into_a_view_of_what_is_computed(name: str) -> None:
    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return VIEWS[name](table * 2)[index]

    table = torch.randn(5, 4)
    length = len(VIEWS[name](table))
    compiled = gradsplit.compile(program, fullgraph=True)
    inside = torch.tensor([0, length - 1, -1, -length])
    assert torch.equal(compiled(table, inside), program(table, inside))
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([0, length, 0, 0]))


def test_an_index_into_what_is_padded_behind() -> None:
    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(table * 2, (0, 3))[index]

    table, index = torch.randn(5), torch.tensor([0, 7, -1, -4, -8])
    assert torch.equal(gradsplit.compile(program, fullgraph=True)(table, index), program(table, index))
