"""The bridge to TorchInductor: our capture, joint graph and schedule, its kernels."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch

import gradsplit
from gradsplit.compile_core import passes
from gradsplit.compile_core.autograd.rewrites.pad_products import pad_products
from gradsplit.compile_core.backends import inductor
from gradsplit.compile_core.ir.graphs import JointGraph


class Net(nn.Module):
    """A buffer that changes, a result that is a view, a loss by class index, and a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.out(functional.gelu(self.norm(x)))
        mask = functional.dropout(torch.ones_like(x), 0.5)
        return functional.cross_entropy(scores, y) + (mask * x).sum(), scores.t(), mask.clone()


def test_a_training_step_equals_the_plain_one() -> None:
    compiled_net = Net()
    plain_net = copy.deepcopy(compiled_net)
    x, y = torch.randn(16, 8, requires_grad=True), torch.randint(0, 5, (16,))
    compiled = gradsplit.compile(compiled_net, backend="inductor", fullgraph=True)
    loss, scores, mask = compiled(x, y)
    (loss + scores.sum()).backward()
    assert x.grad is not None
    assert set(mask.unique().tolist()) == {0.0, 2.0}, "half are dropped, the others doubled"

    with_grad, x.grad = x.grad, None
    scores_of_plain = plain_net.out(functional.gelu(plain_net.norm(x)))
    # TorchInductor draws other random numbers; those of its forward must be those of its backward.
    plain_loss = functional.cross_entropy(scores_of_plain, y) + (mask * x).sum()
    (plain_loss + scores_of_plain.sum()).backward()
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(scores, scores_of_plain.t())
    assert scores.stride() == scores_of_plain.t().stride()
    torch.testing.assert_close(with_grad, x.grad)
    for found, expected in zip(compiled_net.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    for found, expected in zip(compiled_net.buffers(), plain_net.buffers(), strict=True):
        torch.testing.assert_close(found, expected)

    torch.manual_seed(3)
    first = compiled(x, y)[2]
    torch.manual_seed(3)
    assert torch.equal(compiled(x, y)[2], first)
    assert not torch.equal(compiled(x, y)[2], first)


def test_rows_that_are_padded_in_the_forward_are_not_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchInductor pads a product's rows for speed, and the backward is compiled for rows without gaps."""
    compile_fx = inductor._inductor().compile_fx
    padded: list[int] = []

    def compile_padded(module: torch.fx.GraphModule, examples: Any, is_backward: bool) -> Any:
        def run(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
            results = list(module(*arguments))
            if is_backward:
                assert all(argument.is_contiguous() for argument in arguments)
                return results
            for position, result in enumerate(results):
                if result.dim() == 2:
                    padded.append(position)
                    wide = torch.zeros(result.shape[0], result.shape[1] + 3)
                    results[position] = wide[:, : result.shape[1]].copy_(result)
            return results

        return run

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_padded)
    x = torch.randn(4, 5, requires_grad=True)
    found = gradsplit.compile(lambda x: torch.exp(x.sin()), backend="inductor")(x)
    found.sum().backward()
    assert padded and found.is_contiguous()
    gradient, x.grad = x.grad, None
    torch.exp(x.sin()).sum().backward()
    torch.testing.assert_close(gradient, x.grad)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Node]:
    """What products read longer, as on a GPU, where tensor cores want aligned rows."""
    found: list[torch.fx.Node] = []

    def pad(joint: JointGraph, with_float32: bool) -> JointGraph:
        joint = pad_products(joint, True, "cpu")
        nodes = joint.module.graph.nodes
        found.extend(node for node in nodes if node.target is torch.ops.aten.cat.default)
        return joint

    monkeypatch.setattr(passes, "pad_products", pad)
    return found


def test_products_come_padded(padded: list[torch.fx.Node]) -> None:
    """Forward and backward read the same padded rows."""
    x, weight = torch.randn(2, 256, 512), torch.randn(1023, 512, requires_grad=True)

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x @ weight.t()
        return functional.cross_entropy(scores.view(-1, 1023), torch.arange(512)), scores

    loss, scores = gradsplit.compile(step, backend="inductor")(x, weight)
    loss.backward()
    assert padded and scores.is_contiguous()
    found, weight.grad = weight.grad, None
    plain_loss, plain_scores = step(x, weight)
    plain_loss.backward()
    torch.testing.assert_close((loss, scores, found), (plain_loss, plain_scores, weight.grad))


def test_attention_between_padded_products(padded: list[torch.fx.Node]) -> None:
    """The padding's operators were taken apart by a new trace, which found other strides and no view of them."""
    x = torch.randn(4, 128, 512)
    weights = [(torch.randn(*shape) / 20).requires_grad_() for shape in ((774, 512), (512, 258))]

    def step(x: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor) -> torch.Tensor:
        heads = [part.view(4, 128, 2, 129).transpose(1, 2) for part in (x @ inward.t()).split(258, -1)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.transpose(1, 2).reshape(4, 128, 258) @ outward.t()

    found = gradsplit.compile(step, backend="inductor", fullgraph=True)(x, *weights)
    assert padded
    expected = step(x, *weights)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(result.square().mean(), weights) for result in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_torchinductor_pads_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the padded memory with the strides of the product without padding."""
    pad_mm = importlib.import_module("torch._inductor.fx_passes.pad_mm")
    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True, raising=False)
    x, weight = torch.randn(4, 5), torch.randn(7, 5)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.t()).as_strided((2, 3), (7, 1), 1).sin()

    with inductor._inductor().config.patch(force_shape_pad=True):
        found = gradsplit.compile(step, backend="inductor")(x, weight)
    torch.testing.assert_close(found, step(x, weight))


def test_kernels_are_timed_on_random_numbers_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fx = inductor._inductor().compile_fx
    compile_inner = compile_fx.compile_fx_inner
    timed: list[torch.Tensor] = []

    def timing(*arguments: Any, **settings: Any) -> Any:
        with no_dispatch():
            timed.append(torch.randn(3))
        return compile_inner(*arguments, **settings)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", timing)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    gradsplit.compile(lambda x: x @ x.t(), backend="inductor")(torch.ones(7, 5))
    assert timed and torch.equal(torch.rand(3), expected)


def test_numbers_that_differ_between_calls() -> None:
    """They are tensors from the second on, with operators between them that the trace did not take apart."""

    def step(x: torch.Tensor, scale: float) -> tuple[Any, ...]:
        return (x * scale).clamp(max=scale), torch.where(x > 0.0, x, scale), scale * 2

    compiled = gradsplit.compile(step, backend="inductor", fullgraph=True)
    for scale in (0.5, 1.5, 2.5):
        x = torch.randn(4, 5, requires_grad=True)
        found, expected = compiled(x, scale), step(x, scale)
        gradients = [torch.autograd.grad(kind[0].sum() + kind[1].sum(), x) for kind in (found, expected)]
        torch.testing.assert_close((found, gradients[0]), (expected, gradients[1]))


def test_random_numbers_of_the_plain_program() -> None:
    compiled = gradsplit.compile(lambda: torch.rand(8), backend="inductor", options={"fallback_random": True})
    torch.manual_seed(3)
    found = compiled()
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(8))
