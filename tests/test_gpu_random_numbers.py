"""Random numbers on a GPU: made in Triton kernels from seeds of the GPU's generator, or eager's on request."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import gradsplit
from tests.autograd.test_random_to_counters import DISTRIBUTIONS
from tests.test_random_numbers import FALLBACK, Encoder, noisy

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def train(model, x, steps=2):
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters()), torch.cuda.get_rng_state()]
    return seen


def test_seeds_of_torch_make_runs_reproducible():
    run, x = gradsplit.compile(noisy, fullgraph=True), torch.randn(40, 50, device=DEVICE)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    state = torch.cuda.get_rng_state()
    third = run(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(run(x), third)
    torch.manual_seed(1)
    assert torch.equal(run(x), first)
    assert torch.equal(run(x), second)
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_one_kernel_whose_mask_the_backward_makes_again(dtype, tmp_path):
    x = torch.randn(64, 100, device=DEVICE, dtype=dtype, requires_grad=True)
    options = {"trace_folder": tmp_path}
    run = gradsplit.compile(lambda x: F.dropout(x + 9, 0.25), fullgraph=True, options=options)
    y = run(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
    assert abs((y != 0).double().mean() - 0.75) < 5 * (0.75 * 0.25 / 6400) ** 0.5
    (entry,) = run.entries
    assert entry.compiled.partitioned.saved_bytes == 16
    for part in ("forward", "backward"):
        (path,) = tmp_path.glob(f"*{part}.loops*")
        assert path.read_text().count("  nest ") == 1


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    program, mean, variance = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 40_000, device=DEVICE)
    values = gradsplit.compile(program, fullgraph=True)(x).double()
    assert abs(values.mean() - mean) < 5 * (variance / values.numel()) ** 0.5
    assert abs(values.var() - variance) < 0.2 * variance


def test_a_model_trains_reproducibly():
    model = gradsplit.compile(Encoder().to(DEVICE), fullgraph=True)
    x = torch.randn(4, 8, 16, device=DEVICE)
    first, again = train(model, x), train(model, x)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
def test_fallback_is_eagers(backend):
    model, x = Encoder().double().to(DEVICE), torch.randn(4, 8, 16, dtype=torch.float64, device=DEVICE)
    compiled = gradsplit.compile(copy.deepcopy(model), fullgraph=True, backend=backend, options=FALLBACK)
    for one, other in zip(train(model, x), train(compiled, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("options", [{}, FALLBACK])
def test_attention_with_dropout_keeps_its_kernel(options, wrapped):
    """Forward and backward of torch's attention agree on the mask; linear in the values, its gradient tells."""
    q, k = (torch.randn(2, 2, 32, 16, device=DEVICE) for _ in range(2))
    v = torch.eye(32, 16, device=DEVICE).expand(2, 2, 32, 16).clone().requires_grad_()

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    def program(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False) if wrapped else attention(q, k, v)

    run = gradsplit.compile(program, fullgraph=True, options=options)
    y = run(q, k, v)
    y.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close((v.grad * v).sum(), y.sum(), rtol=1e-4, atol=1e-4)


def _head(x):
    """The first token's dropout, as classifiers have it."""
    return F.dropout(F.layer_norm(x * 2, x.shape[-1:])[:, 0], 0.5)


@pytest.mark.parametrize(
    "program",
    [
        _head,
        lambda x: F.dropout((x * 2).relu()[1:], 0.5),
        lambda x: F.dropout((x * 2).relu().flatten()[1:], 0.5),
        lambda x: F.dropout((x * 2).relu()[:, 1:], 0.5),
        lambda x: torch.rand_like((x * 2).relu()[:, 1:, ::2]) + x.sum(),
        lambda x: torch.bernoulli((x * 2).sigmoid().mT[:, 3:]),
        lambda x: F.dropout((x * 2)[:1].expand(4, 9, 64), 0.5),
    ],
)
def test_parts_of_tensors_find_eagers_numbers(program):
    x = torch.randn(4, 9, 64, device=DEVICE)
    torch.manual_seed(0)
    expected = program(x)
    torch.manual_seed(0)
    found = gradsplit.compile(program, fullgraph=True, options={"fallback_random": True})(x)
    torch.testing.assert_close(found, expected)
