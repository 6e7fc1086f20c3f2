"""``mark_dynamic``, ``maybe_mark_dynamic`` and ``mark_static``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

import gradsplit


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return gradsplit.compile(function, backend="eager", fullgraph=True, **options)


def marked(*size: int, dim: int | list[int] = 0, **bounds: int) -> torch.Tensor:
    x = torch.randn(size)
    gradsplit.mark_dynamic(x, dim, **bounds)
    return x


def test_a_marked_dim_is_open_at_the_first_call() -> None:
    made = compiled(lambda x: x * x.shape[0])
    made(marked(3, 4))
    for rows in (5, 7, 512):
        x = torch.randn(rows, 4)
        assert torch.equal(made(x), x * rows)
    assert len(made.entries) == 1
    made(torch.randn(3, 5))  # the other dim is static at first
    assert len(made.entries) == 2


def test_several_dims() -> None:
    made = compiled(lambda x: x.flatten() * 2)
    made(marked(3, 4, dim=[0, -1]))
    made(torch.randn(5, 7))
    assert len(made.entries) == 1


def test_a_marked_dim_that_comes_to_be_one_value_is_an_error_with_the_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y + torch.ones(3, 4)  # needs three rows

    with pytest.raises(gradsplit.CompileError) as raised:
        compiled(function)(marked(3, 4))
    message = str(raised.value)
    assert "dim 0 of x is marked as dynamic, but the program as captured only works for the size 3" in message
    assert "needs three rows" in message and __file__ in message


def test_a_loop_over_a_marked_dim_is_an_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for row in range(x.shape[0]):
            x = x + row
        return x

    with pytest.raises(gradsplit.CompileError, match=r"only works for the size 3.*\n.*\n?.*for row in range"):
        compiled(function)(marked(3, 4))


def test_sizes_0_and_1_cannot_be_marked() -> None:
    with pytest.raises(gradsplit.CompileError, match="specialised to the size 1"):
        compiled(lambda x: x + 1)(marked(1, 4))


def test_bounds_are_guards() -> None:
    made = compiled(lambda x: x * 2 if x.shape[0] <= 512 else x * 3)
    made(marked(3, 4, min=2, max=512))
    texts = [guard.text for guard in made.entries[0].captured.guards]
    assert "x.shape[0] <= 512" in texts
    assert torch.equal(made(torch.ones(600, 1)), torch.full((600, 1), 3.0))
    with pytest.raises(gradsplit.CompileError, match="outside of the range"):
        made(marked(9, 5, max=8))


def test_a_program_that_works_for_fewer_sizes_than_the_bounds_say() -> None:
    made = compiled(lambda x: x * 2 if x.shape[0] <= 100 else x * 3)
    with pytest.raises(gradsplit.CompileError, match="only works for sizes from 2 to 100"):
        made(marked(3, 4, max=512))


def test_maybe() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    gradsplit.maybe_mark_dynamic(x, 0)
    gradsplit.maybe_mark_dynamic(y, 0)
    made = compiled(lambda x, y: x + y + torch.ones(3, 1))
    made(x, y)
    gradsplit.maybe_mark_dynamic(x, 1)
    open_columns = compiled(lambda x: x * 2)
    open_columns(x)
    open_columns(torch.randn(7, 9))
    assert len(open_columns.entries) == 1


def test_static() -> None:
    made = compiled(lambda x: x * 2, dynamic=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 4)
        gradsplit.mark_static(x, 0)
        made(x)
    assert len(made.entries) == 3
    all_static = torch.randn(6, 6)
    gradsplit.mark_static(all_static)
    made(all_static)
    assert "[6, 6]" in made.entries[0].captured.guards[1].text


def test_the_last_mark_counts() -> None:
    x = marked(3, 4)
    gradsplit.mark_static(x, 0)
    made = compiled(lambda x: x + torch.ones(3, 1))
    made(x)
    gradsplit.mark_dynamic(x, 0)
    with pytest.raises(gradsplit.CompileError):
        compiled(lambda x: x + torch.ones(3, 1))(x)


def test_never_is_never() -> None:
    made = compiled(lambda x: x + torch.ones(3, 1), dynamic=False)
    made(marked(3, 4))


def test_a_dim_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="dim 2 of a tensor with 2 dims"):
        gradsplit.mark_dynamic(torch.randn(3, 4), 2)


def test_marks_of_torch_are_heeded() -> None:
    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0, max=512)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    made = compiled(lambda x: x * 2)
    made(x)
    made(torch.randn(5, 6))
    assert len(made.entries) == 1
    y = torch.randn(3, 4)
    torch._dynamo.mark_static(y, 0)
    made = compiled(lambda x: x * 2, dynamic=True)
    made(y)
    made(torch.randn(5, 6))
    assert len(made.entries) == 2
