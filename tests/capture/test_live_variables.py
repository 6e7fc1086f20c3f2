"""Variables that nothing reads after a graph break."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from gradsplit.compile_core.capture.code_objects.instructions import decode
from gradsplit.compile_core.capture.code_objects.live_variables import live_variables


def loops(n, a, b):
    for k in range(n):
        c = a
        a = k
    if n:
        del b
    return c


def handles(a, b):
    try:
        a = 1
        print(a)
        a = 2
    except ValueError:
        return b
    return 3


@pytest.mark.parametrize(
    ("function", "last", "live"),
    [
        (loops, "STORE_FAST k", {"k", "a", "b", "n"}),  # set in the loop, and read where that begins anew
        (handles, "STORE_FAST a", {"a", "b"}),
    ],
)
def test_the_variables_that_may_be_read(function, last, live):
    instructions = decode(function.__code__).instructions
    name, variable = last.split()
    at = next(k for k, found in enumerate(instructions) if (found.name, found.value) == (name, variable))
    assert live_variables(function.__code__, at + 1) == live


def test_what_nobody_reads_after_a_break_is_no_result():
    """It would have a history of its own, with what that saves: plain PyTorch has freed it."""

    def program(x):
        y = x.sigmoid().sum()
        dead = torch.special.entr(x)  # noqa: F841
        print(end="")
        with torch.no_grad():
            x.zero_()
        return y

    leaves = [torch.rand(3, requires_grad=True) for _ in range(2)]
    leaves[1].data.copy_(leaves[0].data)
    gradsplit.compile(program)(leaves[0] * 1).backward()
    program(leaves[1] * 1).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_a_result_that_is_changed_behind_autograds_back():
    """Plain PyTorch's backward reads the results that it has saved as they are by then."""

    def program(x, y):
        z, power = x.sigmoid(), x**y
        print(end="")
        z.data.mul_(2)
        power.data.mul_(3)
        return z.sum() + power.sum()

    gradients = []
    for function in (program, gradsplit.compile(program)):
        x, y = (torch.arange(1.0, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        gradients.append(torch.autograd.grad(function(x, y), [x, y]))
    torch.testing.assert_close(gradients[1], gradients[0])
