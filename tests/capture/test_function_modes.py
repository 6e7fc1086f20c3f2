"""Modes that see every call of torch's functions, entered in captured code."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradsplit
from tests.capture.same_as_plain import check_same


def masked(mask, scores):
    """A mask by a function of two positions, as models of transformers make one."""

    def may_attend(query, key):
        return (query >= key) & mask[key] | (mask[query] & mask[0])

    positions = torch.arange(3)
    with TransformGetItemToIndex():
        allowed = vmap(vmap(may_attend, (None, 0)), (0, None))(positions, positions)
    return scores.masked_fill(~allowed, -1e9).softmax(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mask_by_positions(backend):
    def arguments():
        return torch.rand(3) > 0.3, torch.randn(2, 3, 3, requires_grad=True)

    check_same(masked, arguments, backend=backend)


def test_items_by_numbers_are_copies():
    def items(x, index):
        with TransformGetItemToIndex():
            row = x[0]
            row.add_(1)
            parts = x[index], x[index, 1], x[[0, 1]], x[..., 1], x[1:], x[None]
        x[2].add_(1)
        return row, parts

    check_same(items, lambda: (torch.randn(3, 3), torch.tensor(1)))


def test_gradients_of_items():
    def summed(x, index):
        with TransformGetItemToIndex():
            return x[index] * x[0]

    check_same(summed, lambda: (torch.randn(3, 4, requires_grad=True), torch.tensor(0)))


def test_a_break_inside_is_plain():
    def breaks(x, index):
        y = x * 2
        with TransformGetItemToIndex():
            print("inside")
            return y[index] + x[0]

    check_same(breaks, lambda: (torch.randn(3, 3), torch.tensor(1)), fullgraph=False)


def test_modes_of_the_program_see_what_plain_python_calls():
    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def function(x):
        with Noting():
            y = x * 2
        return y + 1

    seen = []
    x = torch.randn(3)
    assert torch.equal(gradsplit.compile(function, backend="eager")(x), x * 2 + 1)
    assert seen == [torch.Tensor.mul]
    assert not gradsplit.explain(function)(x).break_reasons


class Noted(TorchFunctionMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class NotedOperators(TorchDispatchMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("mode", "reason"), [(Noted, None), (NotedOperators, "torch-dispatch-mode")])
def test_modes_of_users_see_the_calls_of_plain_python(mode, reason, backend):
    def helper(x):
        return torch.sin(x) * x + 1

    def program(x, log):
        with mode(log):
            y = helper(x)
            with torch.no_grad():
                z = y.exp()
        return helper(y) * z

    if reason is None:
        gradsplit.compile(program, fullgraph=True)(torch.ones(2), [])
    else:
        with pytest.raises(gradsplit.Unsupported, match=reason):
            gradsplit.compile(program, fullgraph=True)(torch.ones(2), [])
    compiled = gradsplit.compile(program, backend=backend)
    around = gradsplit.compile(helper, backend=backend)
    for _ in range(2):
        seen = []
        for inside, outside in ((program, helper), (compiled, around)):
            log: list[str] = []
            x = torch.ones(2, requires_grad=True)
            y = inside(x, log)
            with mode(log):
                z = outside(y)
            (z + outside(y)).sum().backward()
            seen.append((y.tolist(), z.tolist(), x.grad.tolist(), log))
        assert seen[0] == seen[1]
