"""The samples of torch's FAQ about NumPy; see ``test_reference_faq``.

What the page runs on a GPU runs here on the CPU too; the arrays are smaller than the page's.
"""

# ruff: noqa: N803, N806 - the page's names

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._numpy as tnp

import gradsplit
from gradsplit import config
from gradsplit.compile_core.interface.testing import CompileCounter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    gradsplit.reset()


def numpy_fn(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1))


def test_numpy_code_is_compiled():
    compiled = gradsplit.compile(numpy_fn, fullgraph=True)
    X = np.random.randn(16, 8)
    Y = np.random.randn(16, 8)
    Z = compiled(X, Y)
    assert isinstance(Z, np.ndarray)
    assert Z.dtype == np.float64
    assert np.allclose(Z, numpy_fn(X, Y))


def test_numpy_code_is_one_graph():
    counter = CompileCounter()
    compiled = gradsplit.compile(numpy_fn, backend=counter)
    for _ in range(2):
        compiled(np.random.randn(16, 8), np.random.randn(16, 8))
    assert counter.frame_count == 1 and counter.op_count > 1


@pytest.mark.parametrize("device", DEVICES)
def test_numpy_code_runs_on_a_device(device):
    compiled = gradsplit.compile(numpy_fn)
    X = np.random.randn(16, 8)
    Y = np.random.randn(16, 8)
    with torch.device(device):
        Z = compiled(X, Y)
    assert isinstance(Z, np.ndarray)
    assert np.allclose(Z, numpy_fn(X, Y))


@pytest.mark.parametrize("device", DEVICES)
def test_wrap_numpy_takes_and_returns_tensors(device):
    @gradsplit.compile(fullgraph=True)
    @gradsplit.wrap_numpy
    def wrapped(X, Y):
        return np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1))

    X = torch.randn(16, 8, device=device)
    Y = torch.randn(16, 8, device=device)
    Z = wrapped(X, Y)
    assert isinstance(Z, torch.Tensor)
    assert Z.device.type == device
    assert torch.allclose(Z, (X[:, :, None] * Y[:, None, :]).sum((-2, -1)), atol=1e-4)


@pytest.mark.parametrize("wrap_numpy", [gradsplit.wrap_numpy, torch.compiler.wrap_numpy])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_flow_through_numpy_code(device, wrap_numpy):
    @gradsplit.compile(fullgraph=True)
    @wrap_numpy
    def wrapped(X, Y):
        return np.mean(np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1)))

    X = torch.randn(16, 8, device=device, requires_grad=True)
    Y = torch.randn(16, 8, device=device)
    Z = wrapped(X, Y)
    assert isinstance(Z, torch.Tensor)
    Z.backward()
    expected = Y.sum(1, keepdim=True).expand(16, 8) / 16
    assert torch.allclose(X.grad, expected, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_break_in_numpy_code(device, capsys):
    @gradsplit.compile
    @gradsplit.wrap_numpy
    def wrapped(X, Y):
        prod = X[:, :, None] * Y[:, None, :]
        print("oops, a graph break!")
        return np.sum(prod, axis=(-2, -1))

    X = torch.randn(16, 8, device=device)
    Y = torch.randn(16, 8, device=device)
    with torch.device(device):
        Z = wrapped(X, Y)
    assert isinstance(Z, torch.Tensor)
    assert Z.device.type == device
    assert torch.allclose(Z, (X[:, :, None] * Y[:, None, :]).sum((-2, -1)), atol=1e-4)
    assert capsys.readouterr().out == "oops, a graph break!\n"


def test_what_torch_wrapped_is_captured_where_it_is_called():
    @torch.compiler.wrap_numpy
    def total(X):
        return np.sum(X * 2, axis=-1)

    compiled = gradsplit.compile(lambda X: total(X + 1) - 1, fullgraph=True)
    X = torch.randn(4, 3)
    assert torch.allclose(compiled(X), ((X + 1) * 2).sum(1) - 1, atol=1e-5)


def test_numpy_is_left_alone_on_request():
    counter = CompileCounter()
    X = np.random.randn(16, 8)
    try:
        config.trace_numpy = False
        assert np.allclose(gradsplit.compile(numpy_fn, backend=counter)(X, X), numpy_fn(X, X))
    finally:
        config.trace_numpy = True
    assert counter.frame_count == 0


def test_the_functions_that_torch_uses_for_numpy_run_as_they_are():
    """The page's remedy for a fault: ``torch._numpy`` in place of NumPy, without compiling."""
    X = torch.randn(4, 3)
    assert torch.allclose(tnp.sum(tnp.asarray(X), axis=1).tensor, X.sum(1))
