"""Where torch's kernels raise, compiled programs raise too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "inverse": (torch.linalg.inv, torch.zeros(3, 3)),
    "solve": (lambda x: torch.linalg.solve(x, x), torch.zeros(3, 3)),
    "cholesky": (torch.linalg.cholesky, -torch.eye(3)),
    "power": (lambda x: torch.linalg.matrix_power(x, -2), torch.zeros(3, 3)),
    "asserted": (lambda x: (torch._assert_async((x > 0).all(), "not all"), x + 1)[1], torch.zeros(3)),
    "cross entropy": (lambda x: torch.nn.functional.binary_cross_entropy(x, x), torch.tensor([0.5, 1.5])),
    "drawn": (torch.bernoulli, torch.tensor([0.5, float("nan")])),
    "drawn in place": (lambda x: x.new_empty(2).bernoulli_(x), torch.tensor([0.5, -0.5])),
}


@pytest.mark.parametrize("backend", ["aot_eager", None])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_kernels_refuse(name: str, backend: str | None) -> None:
    """An operator that does nothing but raise stays in the graph."""
    function, refused = REFUSED[name]
    compiled = gradsplit.compile(lambda x: function(x) * 2, fullgraph=True, backend=backend)
    accepted = torch.eye(3) if refused.dim() == 2 else torch.full_like(refused, 0.5)
    assert compiled(accepted).shape == accepted.shape or name == "cross entropy"
    with pytest.raises(RuntimeError) as expected:
        function(refused)
    with pytest.raises(expected.type) as found:
        compiled(refused)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


UNREAD: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {
    "index": (lambda i: torch.ones(4)[i] * 2, torch.tensor([0, 9])),
    "rows": (lambda i: torch.nn.functional.embedding(i, torch.ones(4, 2)).sum(), torch.tensor([0, 9])),
    "scattered": (lambda i: torch.ones(4).scatter(0, i, 1.0), torch.tensor([0, 9])),
    "classes": (lambda i: torch.nn.functional.one_hot(i, 4), torch.tensor([0, 9])),
    "target": (lambda i: torch.nn.functional.cross_entropy(torch.ones(2, 4), i), torch.tensor([0, 9])),
    "divisor": (lambda i: 3 % i, torch.tensor([1, 0])),
    "histogram": (lambda x: torch.histc(x, 4) + 1, torch.tensor([1.0, float("nan")])),
    "factor": (torch.linalg.cholesky, -torch.eye(3)),
    "eigenvalues": (lambda x: torch.linalg.eigh(x)[0], torch.full((3, 3), float("nan"))),
}


@pytest.mark.parametrize("backend", ["aot_eager", None])
@pytest.mark.parametrize("name", UNREAD)
def test_numbers_that_kernels_refuse_of_which_nobody_reads_the_result(name: str, backend: str | None) -> None:
    function, refused = UNREAD[name]

    def calls(x: torch.Tensor) -> torch.Tensor:
        function(x)
        return x + 1

    compiled = gradsplit.compile(calls, fullgraph=True, backend=backend)
    accepted = torch.eye(3) if refused.dim() == 2 else torch.ones_like(refused)
    assert torch.equal(compiled(accepted), accepted + 1)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(refused)
    with pytest.raises(expected.type):
        compiled(refused)


class _Inverted(torch.autograd.Function):
    """The gradient is the inverse of what comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(gradient)


def test_numbers_that_kernels_refuse_in_a_backward() -> None:
    compiled = gradsplit.compile(lambda x: _Inverted.apply(x) * 2, fullgraph=True)
    x = torch.ones(2, 2, requires_grad=True)
    result = compiled(x)
    result.backward(torch.eye(2), retain_graph=True)
    assert x.grad is not None and torch.equal(x.grad, torch.eye(2) / 2)
    with pytest.raises(torch.linalg.LinAlgError):
        result.backward(torch.zeros(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_two_functions_become_one(dtype: torch.dtype) -> None:
    """As g++ would make of the sine of an arc tangent, which is 1 for NaN then."""
    outer = ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "log")
    inner = ("asin", "acos", "atan", "asinh", "acosh", "atanh", "log", "exp")

    def pairs(x: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(getattr(x, second)(), first)() for first in outer for second in inner]

    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.5, -0.5, 2.0, 0.0, -0.0], dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for found, expected in zip(gradsplit.compile(pairs, fullgraph=True)(x), pairs(x), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=tolerance, atol=0.0)
