"""``torch.autograd.Function`` in the joint trace: the program's own backward, whatever it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tests.autograd.observed_call import check_call
from tests.autograd.scenarios import for_each, leaf

BACKENDS = ["aot_eager", "triton"]

Function = torch.autograd.Function


class SavesInputs(Function):
    """Its gradients are not the true ones, so that nobody can confuse them."""

    @staticmethod
    def forward(ctx: Any, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g):
        x, w = ctx.saved_tensors
        return g * w * 2, g * x * 3


class SavesItsResult(Function):
    @staticmethod
    def forward(ctx: Any, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g):
        (y,) = ctx.saved_tensors
        return g * y * 2


class ChangesTheGradient(Function):
    @staticmethod
    def forward(ctx: Any, x):
        ctx.factor = x.detach().sin()
        return x * 2

    @staticmethod
    def backward(ctx: Any, g):
        g = g.clone()
        g[0] = 0
        return g.mul_(ctx.factor.add_(1))


class SomeResultsUndifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x):
        order = x.argsort(-1)
        copy = x.detach() * 2
        ctx.mark_non_differentiable(order, copy)
        ctx.save_for_backward(order)
        return x.gather(-1, order), order, copy

    @staticmethod
    def backward(ctx: Any, g, _order, _copy):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter_(-1, order, g)


class ChangesItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x, w):
        x.mul_(w)
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x, w * 2

    @staticmethod
    def backward(ctx: Any, g, h):
        (w,) = ctx.saved_tensors
        return g * w, h * 2


class NoGradient(Function):
    @staticmethod
    def forward(ctx: Any, x, w, factor):
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, g):
        return g * ctx.factor, None, None


class WithSetup(Function):
    @staticmethod
    def forward(x, w):
        return x @ w, x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.rows = output[0].shape[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g, h):
        x, w = ctx.saved_tensors
        found = None if g is None else g @ w.t()
        if h is not None:
            found = h.expand(x.shape) * ctx.rows + (0 if found is None else found)
        return found, (x.t() @ g if ctx.needs_input_grad[1] and g is not None else None)


class SavesWhatIsNeeded(Function):
    @staticmethod
    def forward(ctx: Any, x, w):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g):
        x, w = ctx.saved_tensors
        return g * w if ctx.needs_input_grad[0] else None, None if x is None else g * x


class PassesOn(Function):
    """As a layer that reverses gradients does."""

    @staticmethod
    def forward(ctx: Any, x):
        return x

    @staticmethod
    def backward(ctx: Any, g):
        return g * -7


class ViewsIt(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, g):
        return g.view(4, 4) * 2


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 2


class MixedPrecision(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g):
        (x,) = ctx.saved_tensors
        return g * x


class ReturnsOtherThings(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x * 1, None, 3, x.shape[0]

    @staticmethod
    def backward(ctx: Any, g, *others):
        return g * 2


class DrawsNumbers(Function):
    @staticmethod
    def forward(ctx: Any, x):
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g):
        (mask,) = ctx.saved_tensors
        return g * mask


def changes_an_intermediate(x, w):
    y = x * 1
    z, doubled = ChangesItsInput.apply(y, w)
    return z + y, doubled, y * 2


def one_of_two_results(x, w):
    return WithSetup.apply(x, w)[0] * 2


def the_other_result(x, w):
    return WithSetup.apply(x, w)[1] * 2


def in_mixed_precision(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return MixedPrecision.apply(x @ w)


def other_results(x, w):
    y, nothing, three, rows = ReturnsOtherThings.apply(x)
    return y * three * rows, nothing


def in_a_checkpoint(x, w):
    return checkpoint(lambda a: SavesInputs.apply(SavesItsResult.apply(a), w) @ w, x, use_reentrant=False)


def in_a_reentrant_checkpoint(x, w):
    return checkpoint(lambda a: SavesInputs.apply(SavesItsResult.apply(a), w) @ w, x, use_reentrant=True)


def under_no_grad(x, w):
    with torch.no_grad():
        y = SavesItsResult.apply(x)
    return y * w


PROGRAMS = {
    "saves_inputs": lambda x, w: SavesInputs.apply(x, w) + 1,
    "saves_its_result": lambda x, w: SavesItsResult.apply(x) * w,
    "changes_the_gradient": lambda x, w: ChangesTheGradient.apply(x) * w,
    "some_results_undifferentiable": lambda x, w: SomeResultsUndifferentiable.apply(x * w),
    "changes_an_intermediate": changes_an_intermediate,
    "no_gradient": lambda x, w: NoGradient.apply(x, w, 2.0),
    "no_gradient_of_an_intermediate": lambda x, w: NoGradient.apply(x, w * 2, 2.0),
    "one_of_two_results": one_of_two_results,
    "the_other_result": the_other_result,
    "passes_on": lambda x, w: PassesOn.apply(x) * w,
    "views_it": lambda x, w: ViewsIt.apply(x * w) * 2,
    "once": lambda x, w: Once.apply(x) * w,
    "in_mixed_precision": in_mixed_precision,
    "other_results": other_results,
    "draws_numbers": lambda x, w: DrawsNumbers.apply(x) * w,
    "in_a_checkpoint": in_a_checkpoint,
    "in_a_reentrant_checkpoint": in_a_reentrant_checkpoint,
    "under_no_grad": under_no_grad,
}


def two_leaves():
    return leaf(4, 4), leaf(4, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(PROGRAMS, "program")
def test_compiled_as_plain(program, backend, caplog):
    check_call(program, two_leaves, backend, caplog)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trainable", [(True, False), (False, True)])
def test_what_is_needed_is_known(trainable, backend, caplog):
    def inputs():
        return tuple(torch.randn(4, 4).requires_grad_(flag) for flag in trainable)

    check_call(lambda x, w: SavesWhatIsNeeded.apply(x, w), inputs, backend, caplog)


def passed_on_with_the_original(x, w):
    y = x * w
    return PassesOn.apply(y), y


# A view made later, outside of the graph, would not go through the program's backward.
VIEWS = {
    "input": lambda x, w: PassesOn.apply(x),
    "view_of_input": lambda x, w: ViewsIt.apply(x),
    "view_of_that": lambda x, w: PassesOn.apply(x).view(2, 8),
    "with_the_original": passed_on_with_the_original,
}


@for_each(VIEWS, "program")
def test_results_that_a_function_made_as_views(program, caplog):
    check_call(program, two_leaves, "aot_eager", caplog, left_to_torch="results-share-storage")
