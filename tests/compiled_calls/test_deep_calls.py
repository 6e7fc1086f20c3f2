"""Programs that recur deep run compiled as they do plainly, with one line of log."""

import logging
import sys

import pytest
import torch

import gradsplit


def adds(x, depth):
    return x if depth == 0 else adds(x + 1, depth - 1)


def adds_and_prints_at_the_end(x, depth):
    if depth == 0:
        print(end="")
        return x
    return adds_and_prints_at_the_end(x + 1, depth - 1) * 1.0


def prints_each_time(x, depth):
    print(end="")
    return x if depth == 0 else even(x + 1, depth - 1)


def even(x, depth):
    return x if depth == 0 else prints_each_time(x + 1, depth - 1)


class Nested(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x, depth):
        return x if self.inner is None else self.inner(x + 1, depth)


@gradsplit.compile(backend="eager")
def decorated(x, depth):
    return x if depth == 0 else decorated(x + 1, depth - 1)


@gradsplit.compile(backend="eager")
def decorated_and_prints(x, depth):
    print(end="")
    return x if depth == 0 else decorated_and_prints(x + 1, depth - 1)


@pytest.mark.parametrize(
    ("program", "depth"),
    [
        (adds, 300),
        (adds_and_prints_at_the_end, 300),
        (prints_each_time, 300),
        (Nested(100), 100),
        (decorated, 300),
        (decorated_and_prints, 300),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_deep_recursion(program, depth, caplog):
    limit = sys.getrecursionlimit()
    x = torch.zeros(2, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = gradsplit.compile(program, backend="eager")(x, depth)
            assert y.tolist() == [float(depth)] * 2
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    lines = [record.getMessage() for record in caplog.records if "is not captured" in record.getMessage()]
    assert len(lines) <= 1 and all(len(line.splitlines()) < 10 for line in lines), lines
    assert sys.getrecursionlimit() == limit


def test_a_recursion_without_end_is_python_s_error():
    def endless(x):
        print(end="")
        return endless(x + 1)

    with pytest.raises(RecursionError):
        gradsplit.compile(endless, backend="eager")(torch.ones(2))
