"""The compiled callable under autograd: what users do with its results and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.autograd.compare_with_eager import compile_program


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def run(program, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return compile_program(program, inputs)(*inputs)


def test_gradient_that_is_not_contiguous():
    x = leaf(3, 4)
    (y,) = run(lambda x: x.sin(), x)
    arriving = torch.randn(4, 3).t()
    y.backward(arriving)
    torch.testing.assert_close(x.grad, arriving * x.detach().cos())


def test_gradient_that_is_expanded():
    x = leaf(3, 4)
    (y,) = run(lambda x: x.sin(), x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_strides_of_dims_of_one_element_cost_no_copy():
    x = leaf(3, 1)
    (y,) = run(lambda x: x + 1, x)
    arriving = torch.randn(1, 3).t()
    (gradient,) = torch.autograd.grad(y, x, arriving)
    assert gradient.data_ptr() == arriving.data_ptr()


def test_result_by_strides_that_leave_the_view_they_are_of():
    """Plain PyTorch gives the part of the memory that the view does not have no gradient."""

    def by_strides(x):
        return (torch.as_strided(x[1:].t(), (8,), (1,), 2),)

    x = leaf(4, 6)
    gradients = [torch.autograd.grad(y, x, torch.arange(8.0)) for (y,) in (by_strides(x), run(by_strides, x))]
    torch.testing.assert_close(*gradients)


def test_result_that_gets_no_gradient():
    x, w = leaf(3), leaf(3)
    y, _ = run(lambda x, w: (x * w, x.exp()), x, w)
    y.sum().backward()
    assert torch.equal(x.grad, w) and torch.equal(w.grad, x)


def test_backward_twice_adds_up():
    x = leaf(3)
    (y,) = run(lambda x: x.exp(), x)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once)


def test_backward_twice_needs_retain_graph():
    x = leaf(3)
    (y,) = run(lambda x: x.exp(), x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_backward_that_needs_nothing_runs_twice():
    x = leaf(3)
    (y,) = run(lambda x: x + 1, x)
    y.sum().backward()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_gradient_of_one_input_only():
    x, w = leaf(3), leaf(3)
    (y,) = run(lambda x, w: x * w, x, w)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], w)


def test_two_gradients_share_no_memory():
    x, w = leaf(2, 2), leaf(4)
    (y,) = run(lambda x, w: x.view(4) + w, x, w)
    (y * 2).sum().backward()
    assert x.grad.data_ptr() != w.grad.data_ptr()


def test_saved_input_changed_by_the_user():
    x, w = torch.randn(3), leaf(3)
    (y,) = run(lambda x, w: x * w, x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _product_and_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first result is what the backward of the second needs."""
    product = x @ x
    return product, product.sin()


def test_saved_result_changed_by_the_user():
    x = leaf(2, 2)
    y, z = run(_product_and_more, x)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_saved_result_changed_through_a_view_by_the_user():
    def program(x):
        product, sine = _product_and_more(x)
        return product.view(4), sine

    x = leaf(2, 2)
    y, z = run(program, x)
    assert not y._is_view()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_result_changed_by_the_user():
    x = leaf(3)
    y, z = run(lambda x: ((x * 2).view(3, 1), x * 3), x)
    y.mul_(5)
    z.add_(1)
    (y.sum() + z.sum()).backward()
    assert torch.equal(x.grad, torch.full((3,), 13.0))


def test_gradient_flows_through_a_view_of_an_input():
    x = leaf(2, 3)
    view, y = run(lambda x: (x.t()[1:], x * 2), x)
    (view.sum() + y.sum()).backward()
    assert torch.equal(x.grad, torch.tensor([[2.0, 3, 3], [2, 3, 3]]))


def test_view_of_an_input_changed_by_the_user():
    x = torch.zeros(2, 3)
    view, _ = run(lambda x: (x.view(6), x * 2), x)
    view.add_(1)
    assert torch.equal(x, torch.ones(2, 3))


def test_activations_as_inputs():
    x, w = leaf(3), leaf(3)
    (y,) = run(lambda x, w: x * w, x * 2, w)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * w)


def test_hooks_of_results_run():
    x = leaf(3)
    (y,) = run(lambda x: x * 2, x)
    y.register_hook(lambda gradient: gradient * 10)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 20.0))
