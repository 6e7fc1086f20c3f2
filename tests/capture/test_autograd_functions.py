"""``torch.autograd.Function`` in captured code: the user's own backward, in one graph."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.function import once_differentiable

import gradsplit
from tests.capture.same_as_plain import check_same

BACKENDS = ["eager", "aot_eager", "triton"]


class DoubledExp(torch.autograd.Function):
    """Its backward is twice the true one, so that nobody can confuse the two."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * 2


class ScaledSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, factor, name):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.factor, name = inputs
        ctx.bonus = 1.0 if name == "bonus" else 0.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor + ctx.bonus, None, None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        ctx.shape = x.shape
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * y, index, x + y

    @staticmethod
    def backward(ctx, product, index, total):
        x, y = ctx.saved_tensors
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = product * y + total.reshape(ctx.shape) * 3
        if ctx.needs_input_grad[1]:
            grad_y = product * x - total
        return grad_x, grad_y


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.5, 0.5)


class NoMaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, one, two):
        return (one * 2 if two is None else one + two) if one is not None else two


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, with_zeros):
        ctx.set_materialize_grads(with_zeros)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x * 2, sign

    @staticmethod
    def backward(ctx, one, two):
        return (one * 3 if two is None else one * 5 + two), None


def doubled_exp(x):
    return DoubledExp.apply(x * 1) + 1


def scaled(x):
    return ScaledSetup.apply(x, 2.5, "bonus") + ScaledSetup.apply(x, 0.5, "none")


def two_results(x):
    product, index, total = TwoResults.apply(x, x.detach() * 2)
    return product + total, index


def in_place(x):
    y = x * 2
    z = InPlace.apply(y)
    return z * y


def once(x):
    apply = Once.apply
    return apply(x)


def straight_through(x):
    return StraightThrough.apply(x.round())


def not_materialized(x):
    return NoMaterialized.apply(x)[0]


def without_gradient(x):
    return WithoutGradient.apply(x, False)


def with_zeros(x):
    return WithoutGradient.apply(x, True)


def under_no_grad(x):
    with torch.no_grad():
        y = DoubledExp.apply(x)
    return y + x


PROGRAMS = [
    doubled_exp, scaled, two_results, in_place, once, straight_through, not_materialized, under_no_grad,
    without_gradient, with_zeros,
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True),), backend=backend)


def test_the_graph_keeps_the_call_atomic():
    compiled = gradsplit.compile(doubled_exp, backend="eager", fullgraph=True)
    compiled(torch.ones(2, requires_grad=True))
    targets = [node.target.__name__ for node in compiled.entries[0].captured.graph.module.graph.nodes
               if node.op == "call_function"]  # fmt: skip
    assert targets == ["mul", "autograd_function", "add"]


FACTOR = 2.0


class ReadsGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_backward_reads_is_guarded(backend, monkeypatch):
    compiled = gradsplit.compile(lambda x: ReadsGlobal.apply(x), backend=backend, fullgraph=True)
    for factor in (2.0, 7.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        x = torch.ones(2, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), factor))


CALLS = []


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        CALLS.append("backward")
        return gradient


class Reads(torch.autograd.Function):
    weight = torch.ones(2)

    @staticmethod
    def forward(ctx, x):
        return x * Reads.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("backend", BACKENDS)
def test_side_effects_in_backward_end_the_graph(backend):
    CALLS.clear()
    compiled = gradsplit.compile(lambda x: Counts.apply(x * 2) + 1, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
    assert CALLS == ["backward", "backward"]
    assert compiled.break_reasons[0].reason_id == "side-effect-in-body"


def test_a_tensor_from_elsewhere_ends_the_graph():
    compiled = gradsplit.compile(lambda x: Reads.apply(x), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert compiled.break_reasons


def test_a_function_that_raises():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("no")

    def program(x):
        try:
            return Raises.apply(x)
        except ValueError:
            return x * 2 if torch.is_grad_enabled() else x

    check_same(program, lambda: (torch.randn(3, requires_grad=True),), backend="eager", fullgraph=False)


def test_a_callable_as_an_argument():
    class Applies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            return function(x)

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient * 3

    double = functools.partial(torch.mul, other=2)
    check_same(
        lambda x: Applies.apply(torch.sin, x) + Applies.apply(double, x),
        lambda: (torch.randn(3, requires_grad=True),),
        backend="aot_eager",
    )
