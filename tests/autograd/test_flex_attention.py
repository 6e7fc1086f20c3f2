"""Attention with changed scores in a joint trace: one call forward and one backward, or else plain operators."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask

import gradsplit
from gradsplit.compile_core.autograd import flex_attention as traced
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.attention_calls import AttentionCall

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 30 + [1] * 50 + [2] * 20)


def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * torch.tanh((score + SLOPES[h] * (j - i)) / 2)


def some_rows(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j) & (i % 7 != 0)


def program(score_mod: Callable[..., Any] = capped, others: tuple[Any, ...] = ()) -> Callable[..., Any]:
    mask = create_block_mask(some_rows, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)

    def attend(query: Any, key: Any, value: Any) -> Any:
        result, sums, _ = operator(query, key, value, score_mod, mask.as_tuple(), 0.3, {}, others)
        return result, torch.where(sums == -math.inf, 0.0, sums)

    return attend


def operands(kv_batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(2, 100, 4, 8).transpose(1, 2)
    return [query, torch.randn(kv_batch, 2, 100, 8), torch.randn(kv_batch, 2, 100, 16)]


def calls_of(function: Callable[..., Any], grad: bool = True) -> list[str]:
    """The kept calls in the joint graph of a function."""
    found: list[str] = []

    def backend(module: GraphModule, examples: Any) -> Any:
        joint = trace_joint(module, examples, {})
        found.extend(str(n.target) for n in joint.module.graph.nodes if isinstance(n.target, AttentionCall))
        return module

    given = [tensor.requires_grad_(grad) for tensor in operands()]
    gradsplit.compile(function, backend=backend, fullgraph=True)(*given)
    return found


def test_a_call_forward_and_a_call_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calls_of(program()), "not on a CPU"
    monkeypatch.setattr(traced, "DEVICE_TYPES", frozenset({"cpu"}))
    assert calls_of(program()) == ["flex_attention", "flex_attention_backward"]
    assert calls_of(program(), grad=False) == ["flex_attention"]


@pytest.mark.parametrize("read", ["score", "nothing", "random"])
def test_plain_operators_where_kernels_could_not(
    read: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced, "DEVICE_TYPES", frozenset({"cpu"}))
    slopes = torch.randn(4, requires_grad=True)

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any, given: Any) -> Any:
        if read == "score":
            return score * given[h]
        return SLOPES[h] * (i - j) if read == "nothing" else score

    others = (slopes if read == "score" else slopes.detach(),)
    if read == "random":
        monkeypatch.setattr(traced, "is_random", lambda node: True)
    with caplog.at_level(logging.INFO):
        assert not calls_of(program(changed, others))
    reasons = {"score": "has a gradient", "nothing": "have no gradient", "random": "more than compute"}
    assert reasons[read] in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("kv_batch", [2, 1])
def test_the_calls_compute_what_torch_does(
    backend: str, kv_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "DEVICE_TYPES", frozenset({"cpu"}))
    compiled = gradsplit.compile(program(), backend=backend, fullgraph=True)
    found = []
    for run in (program(), compiled):
        given = [tensor.requires_grad_() for tensor in operands(kv_batch)]
        results = run(*given)
        torch.autograd.backward(results, [torch.linspace(-1, 2, r.numel()).view(r.shape) for r in results])
        found.append([*results, *(tensor.grad for tensor in given)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert [t.stride() for t in found[1]] == [t.stride() for t in found[0]]
