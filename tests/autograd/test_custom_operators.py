"""Operators that users registered and that write to their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradsplit


@torch.library.custom_op("gradsplit_tests::scale_", mutates_args={"x"})
def scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("gradsplit_tests::move", mutates_args={"sources"})
def move(sources: list[Tensor], target: Tensor) -> Tensor:
    for source in sources:
        target = target + source
        source.zero_()
    return target


@move.register_fake
def _(sources, target):
    return torch.empty_like(target)


def of_an_input(x, y):
    scale_(x, 3.0)
    return x + y


def of_an_intermediate(x, y):
    z = x + 1
    scale_(z[0], 2.0)
    return z * y


def of_a_list(x, y):
    total = move([x, y], x * 2)
    return total + x + y


def twice(x, y):
    scale_(x, 2.0)
    scale_(factor=0.5, x=y)
    scale_(x, 2.0)
    return x - y


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("program", [of_an_input, of_an_intermediate, of_a_list, twice])
def test_changes_are_those_of_eager(program, backend, caplog):
    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    for seed in (0, 1):
        torch.manual_seed(seed)
        given = [torch.randn(3, 4), torch.randn(3, 4)]
        copies = [tensor.clone() for tensor in given]
        torch.testing.assert_close(compiled(*given), program(*copies))
        torch.testing.assert_close(given, copies)
    assert "torch's own kernels" not in caplog.text


def test_under_autograd_it_is_left_to_torch(caplog):
    def program(x, w):
        z = x * w
        scale_(z, 2.0)
        return (z * w).sum()

    gradients = []
    for run in (program, gradsplit.compile(program)):
        w = torch.full((3,), 2.0, requires_grad=True)
        run(torch.ones(3), w).backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)
    assert "custom-operator-gradient" in caplog.text


def test_only_what_is_differentiated_counts(caplog):
    def program(x, w):
        scale_(x, 2.0)
        return (x * w).sum()

    w = torch.ones(3, requires_grad=True)
    gradsplit.compile(program)(torch.ones(3), w).backward()
    assert w.grad.tolist() == [2, 2, 2]
    assert "torch's own kernels" not in caplog.text


@torch.library.custom_op("gradsplit_tests::shift_", mutates_args={"x"})
def shift_(x: Tensor, by: int) -> None:
    x.add_(by)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_numbers_that_differ_are_those_of_the_call(backend):
    def program(x):
        y = x * 2
        shift_(y, x.shape[0])
        return y

    counter = gradsplit.testing.CompileCounterWithBackend(backend)
    compiled = gradsplit.compile(program, backend=counter, fullgraph=True)
    for size in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(torch.ones(size)), program(torch.ones(size)))
    assert counter.frame_count == 2
