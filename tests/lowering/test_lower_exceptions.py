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
