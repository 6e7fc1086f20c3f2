"""Modes, dtypes and kinds of tensors in the joint trace: compiled programs see what plain ones see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import gradsplit
from tests.autograd.observed_call import check_call
from tests.autograd.scenarios import for_each, leaf

BACKENDS = ["aot_eager", "triton"]

half = torch.bfloat16


def two_leaves():
    return leaf(4, 4), leaf(4, 4)


def nested_autocast(x, w):
    with torch.autocast("cpu", dtype=half):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ y.float()
        return y, z, F.softmax(y, -1), F.layer_norm(y, (4,)), F.mse_loss(y, z)


def autocast_without_cache(x, w):
    with torch.autocast("cpu", dtype=half, cache_enabled=False):
        return x @ w


@torch.autocast("cpu", dtype=half)
def decorated_with_autocast(x, w):
    return x @ w


def convolution_in_autocast(x, w):
    with torch.autocast("cpu", dtype=half):
        return F.conv2d(x.view(1, 1, 4, 4), w.view(1, 1, 4, 4))


def autocast_off_inside(x, w):
    with torch.autocast("cpu", enabled=False):
        y = x @ w
    return y, F.linear(y.detach(), w, w[0])


AUTOCAST = {
    "nested": nested_autocast,
    "without_cache": autocast_without_cache,
    "decorator": lambda x, w: decorated_with_autocast(x, w),
    "convolution": convolution_in_autocast,
}


@for_each(AUTOCAST, "program")
def test_autocast(program, caplog):
    check_call(program, two_leaves, "aot_eager", caplog)


@pytest.mark.parametrize("backend", BACKENDS)
@for_each({"product": lambda x, w: x @ w, "off_inside": autocast_off_inside}, "program")
def test_autocast_of_the_caller(program, backend, caplog):
    """The program's casts are in the graph, which runs without the caller's."""
    check_call(program, two_leaves, backend, caplog, mode=lambda: torch.autocast("cpu", dtype=half))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_is_not_cast(backend):
    """Where it is called under autocast, which torch advises against, it computes what it would without."""
    x, w = two_leaves()
    compiled = gradsplit.compile(lambda x, w: x.sin() @ w, backend=backend)
    loss = compiled(x, w).square().sum()
    expected = torch.autograd.grad(loss, (x, w), retain_graph=True)
    with torch.autocast("cpu", dtype=half):
        found = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, found, expected))


def no_grad_region(x, w):
    with torch.no_grad():
        a = x @ w
        with torch.enable_grad():
            b = x * 2
    return a, b, (x * a + b).sum()


def gradients_switched(x, w):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y, x * w


def detached_in_between(x, w):
    y = (x @ w).detach()
    return y * x, y


def tensors_made_inside(x, w):
    made = torch.zeros(4, 4)
    made[0] = x[1]
    return made * w + torch.full((4,), 2.0) + torch.eye(4), torch.arange(4)


def integers_and_flags(x, w):
    return x.argmax(), x > 0, x.long(), (x * w).topk(2), x.shape[0]


def layouts(x, w):
    return (x * w).t(), (x * 2).t().contiguous().t(), x.expand(3, 4, 4) * w


def used_several_times(x, w):
    return F.linear(F.linear(x, w), w) + w.sum()


def bits(x, w):
    return ((x * 2).detach().view(torch.int32) & 0x7FFFFFFF).view(torch.float32) * w


def leaf_in_between(x, w):
    """What ``enable_input_require_grads`` does to a frozen embedding."""
    hidden = (x.detach() * 2).requires_grad_()
    return checkpoint(lambda a: a @ w, hidden, use_reentrant=True).sin(), hidden.view(-1) * 3


def marked_again(x, w):
    y = (x * 2).requires_grad_()
    return y * w, y.detach().requires_grad_(False)


def attention_by_mathematics(x, w):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None])


def other_default_dtype(x, w):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    y = torch.ones(4) * torch.rand(4)
    torch.set_default_dtype(before)
    return x * y, y, torch.ones(4), x.long() / 3


def spectrum(x, w):
    transformed = torch.fft.fft(x)
    return torch.fft.ifft(transformed * torch.fft.fft(w)).real * 1, transformed.abs()


def complex_from_parts(x, w):
    z = torch.complex(x, w) * torch.polar(x.abs(), w)
    return z.abs().sum(), torch.view_as_complex(torch.stack([x, w], -1)).sum(), (z + 1j).exp()


PROGRAMS = {
    function.__name__: function
    for function in (
        no_grad_region, gradients_switched, detached_in_between, tensors_made_inside, integers_and_flags, layouts,
        used_several_times, bits, leaf_in_between, marked_again, attention_by_mathematics, other_default_dtype,
        spectrum, complex_from_parts,
    )
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(PROGRAMS, "program")
def test_compiled_as_plain(program, backend, caplog):
    check_call(program, two_leaves, backend, caplog)


def gradients_enabled_inside(x, w):
    with torch.enable_grad():
        y = x * w
    return y, y * 2


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(
    {"not_at_all": lambda x, w: (x @ w, x.view(-1), x), "inside": gradients_enabled_inside},
    argument="program",
)
def test_gradients_where_the_caller_has_none(program, backend, caplog):
    check_call(program, two_leaves, backend, caplog, mode=torch.no_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_of_the_caller(backend, caplog):
    check_call(
        lambda x, w: (x @ w, x.view(-1)), lambda: (torch.randn(4, 4), torch.randn(4, 4)), backend, caplog,
        mode=torch.inference_mode,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_complex_inputs(backend, caplog):
    def program(x, w):
        return (x * w + 1j).exp(), (x.conj() * w).sum(), x.real * 2, (x @ w).angle()

    check_call(
        program,
        lambda: (leaf(4, 4, dtype=torch.complex64), leaf(4, 4, dtype=torch.complex64)),
        backend,
        caplog,
    )


# What no functional graph can say is left to torch's own kernels.


def leaf_returned(x, w):
    y = (x.detach() * 2).requires_grad_()
    return y, (y * w).sum()


def division_under_another_default(x, w):
    torch.set_default_dtype(torch.float64)
    y = torch.arange(4) / 3
    torch.set_default_dtype(torch.float32)
    return x * y


def bits_of_an_input(x, w):
    return x.detach().view(torch.int32), x * w


def inference_inside(x, w):
    with torch.inference_mode():
        y = x @ w
    return x * y.shape[0]


def deterministic_convolutions(x, w):
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        return F.conv2d(x[None, None], w[None, None])


def sparse_gradient(x, w):
    return F.embedding(torch.arange(3), w, sparse=True) * 2


def test_a_sparse_gradient(caplog):
    check_call(sparse_gradient, two_leaves, "aot_eager", caplog)
    check_call(sparse_gradient, two_leaves, "triton", caplog, left_to_torch="sparse-tensor")


def view_without_gradients(x, w):
    """A leaf: what is computed from it gives it gradients of its own."""
    with torch.no_grad():
        y = x.view(-1)
    return y, y.sin()


LEFT_TO_TORCH = {
    "new-leaf": leaf_returned,
    "default-dtype": division_under_another_default,
    "reinterpreting-view": bits_of_an_input,
    "inference-mode": inference_inside,
    "switch": deterministic_convolutions,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reason", LEFT_TO_TORCH)
def test_left_to_torch(reason, backend, caplog):
    check_call(LEFT_TO_TORCH[reason], two_leaves, backend, caplog, left_to_torch=reason)


def view_of_a_view_without_gradients(x, w):
    with torch.no_grad():
        y = x.view(-1)
    return y.narrow(0, 1, 2), w * 2


def test_a_view_whose_history_ends_before_its_base(caplog):
    check_call(
        view_of_a_view_without_gradients,
        two_leaves,
        "aot_eager",
        caplog,
        left_to_torch="results-share-storage",
    )


def test_other_leaves(caplog):
    check_call(view_without_gradients, two_leaves, "aot_eager", caplog, left_to_torch="new-leaf")
    check_call(
        lambda x: (x * 2).requires_grad_().sin(), lambda: (torch.randn(3),), "aot_eager", caplog,
        left_to_torch="new-leaf",
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_a_leaf_that_is_made_where_no_gradients_are(shape, backend):
    """It has none of the caller's gradients, and so none of its history: a result would hand its gradient on."""

    def make(x):
        return (x * 2).detach().requires_grad_().view(shape)

    x = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        leaf = gradsplit.compile(make, backend=backend, fullgraph=True)(x)
    assert leaf.is_leaf and leaf.requires_grad
    (leaf * 3).sum().backward()
    assert x.grad is None
