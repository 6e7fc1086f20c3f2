"""The samples of torch's FAQ about ``torch.func``; see ``test_reference_faq``."""

from __future__ import annotations

import pytest
import torch

import gradsplit


@pytest.fixture(autouse=True)
def nothing_compiled():
    gradsplit.reset()


def test_a_transform_of_a_compiled_function():
    """The page writes ``torch.grad``, which torch does not have, of a function that returns no scalar."""

    @gradsplit.compile
    def f(x):
        return torch.sin(x)

    def g(x):
        return torch.func.vmap(torch.func.vmap(torch.func.grad(f)))(x)

    x = torch.randn(2, 3)
    assert torch.allclose(g(x), x.cos())
    assert torch.allclose(f(x), x.sin())


def test_grad_in_a_compiled_function():
    def wrapper_fn(x):
        return torch.func.grad(lambda x: x.sin().sum())(x)

    x = torch.randn(3, 3, 3)
    grad_x = gradsplit.compile(wrapper_fn, fullgraph=True)(x)
    assert torch.allclose(grad_x, x.cos(), atol=1e-6)


def test_vmap_in_a_compiled_function():
    def my_fn(x):
        return torch.vmap(lambda x: x.sum(1))(x)

    x = torch.randn(3, 3, 3)
    output = gradsplit.compile(my_fn, fullgraph=True)(x)
    assert torch.allclose(output, x.sum(2), atol=1e-6)


def test_allow_in_graph_for_other_transforms():
    @gradsplit.compile(fullgraph=True)
    def f(x):
        return gradsplit.allow_in_graph(torch.vmap(torch.sum))(x)

    x = torch.randn(2, 3)
    assert torch.allclose(f(x), x.sum(1), atol=1e-6)


def test_allow_in_graph_with_functional_call():
    """The page's remedy for a function that calls a module: its state comes in as arguments."""
    model = torch.nn.Linear(3, 2)

    @gradsplit.allow_in_graph
    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    @gradsplit.compile(fullgraph=True, backend="eager")
    def f(weight, bias, x):
        return call({"weight": weight, "bias": bias}, x) * 2

    x = torch.randn(4, 3)
    assert torch.allclose(f(model.weight, model.bias, x), model(x) * 2)
