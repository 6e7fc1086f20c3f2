"""Values stored where a mask says so: their gradients are those of plain PyTorch, without sizes that depend on data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsplit
from tests.autograd.observed_call import check_call
from tests.autograd.scenarios import leaf

BACKENDS = ["aot_eager", "triton"]


def _stored(x: Any, mask: Any, value: Any) -> Any:
    x = x * 2
    x[mask] = value.sin()
    return x.exp() * value.sum()


def _with_slices(x: Any, mask: Any, value: Any) -> Any:
    x = x * 2
    x[mask, :] = value.sin()
    x[mask, ...] = value * 2
    return x


def _in_a_view(x: Any, mask: Any, value: Any) -> Any:
    x = x * 2
    x.transpose(0, 1)[mask.t()] = value.sin()
    return x


def _put(x: Any, mask: Any, value: Any) -> Any:
    return torch.index_put(x, (mask,), value) + x.index_put((mask,), value.cos())


def _put_in_place(x: Any, mask: Any, value: Any) -> Any:
    return (x * 2).index_put_((mask,), value)


def _into_constants(x: Any, mask: Any, value: Any) -> Any:
    filled = torch.zeros(3, 4, 5)
    filled[mask] = value
    return filled * x.sin()


def _into_an_input(x: Any, mask: Any, value: Any) -> Any:
    x = x.detach()
    x[mask] = value.detach()
    return x * value.sum()


def _masks(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) > 0.5


CASES = {
    "row": lambda: (leaf(3, 4, 5), _masks(3, 4), leaf(5)),
    "row of one": lambda: (leaf(3, 4, 5), _masks(3, 4), leaf(1, 5)),
    "number": lambda: (leaf(3, 4, 5), _masks(3, 4), leaf(1)),
    "scalar": lambda: (leaf(3, 4, 5), _masks(3, 4), torch.tensor(2.0, requires_grad=True)),
    "nothing": lambda: (leaf(3, 4, 5), torch.zeros(3, 4, dtype=torch.bool), leaf(5)),
    "not a number": lambda: (leaf(3, 4, 5), _masks(3, 4), leaf(5).detach().div_(0).requires_grad_()),
}  # fmt: skip
PROGRAMS = (_stored, _with_slices, _in_a_view, _put, _put_in_place, _into_constants, _into_an_input)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(program: Any, case: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    check_call(program, CASES[case], backend, caplog)


def test_whole_dims(caplog: pytest.LogCaptureFixture) -> None:
    for make in (
        lambda: (leaf(3, 4), _masks(3), leaf(4)),
        lambda: (leaf(3, 1), _masks(3), leaf(1, 1)),
        lambda: (leaf(3, 4), _masks(3, 4), leaf(1)),
    ):
        check_call(_stored, make, "triton", caplog)


def test_sizes_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    counter = gradsplit.testing.CompileCounterWithBackend("triton")
    compiled = gradsplit.compile(_stored, backend=counter, dynamic=True)
    value = leaf(5)
    for rows in (3, 4, 7):
        x, mask = leaf(rows, 4, 5), _masks(rows, 4)
        found = [torch.autograd.grad(call(x, mask, value).sum(), (x, value)) for call in (_stored, compiled)]
        torch.testing.assert_close(*found)
    assert counter.frame_count == 1 and not caplog.records


def test_a_value_for_each_place_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Whose gradient has a size that depends on data."""
    mask = torch.tensor([True, False, True, True])
    check_call(
        _stored, lambda: (leaf(4, 5), mask, leaf(3, 5)), "triton", caplog, left_to_torch="trace-failed"
    )


def test_what_raises_raises() -> None:
    compiled = gradsplit.compile(_stored)
    for value in (leaf(4), leaf(2, 5), leaf(5, dtype=torch.float64)):
        for call in (_stored, compiled):
            with pytest.raises((RuntimeError, IndexError)):
                call(leaf(3, 4, 5), torch.tensor([True, False, True])[:, None].expand(3, 4), value)
