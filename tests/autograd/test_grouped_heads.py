"""Attention of queries in groups, whose program repeats keys and values: they are read once where a kernel can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.autograd.captured_graphs import grouped_heads
from gradsplit.compile_core.autograd.captured_graphs.attention_calls import attention_laid_out
from tests.autograd.compare_with_eager import check_call

HEADS, GROUPS, LENGTH, SIZE = 6, 2, 5, 4


def expanded(x: Tensor) -> Tensor:
    batch, groups, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, groups, 3, length, size).reshape(batch, groups * 3, length, size)


def interleaved(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, 3, dim=1)


def repeated_by_method(x: Tensor) -> Tensor:
    return x.repeat_interleave(repeats=3, dim=-3)


def in_turns(x: Tensor) -> Tensor:
    return x.repeat(1, 3, 1, 1)


def of_others(x: Tensor) -> Tensor:
    return expanded(x.flip(1)) + 0


def changed_later(x: Tensor) -> Tensor:
    return expanded(x).mul_(2)


def attend(repeat: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (repeat((x * 2).transpose(1, 2)) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    return function


def under_checkpoint(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(attend(expanded), query, key, value, use_reentrant=False)


def one_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x[:, :, :1].transpose(1, 2) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def one_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x[:1, :, :1].transpose(1, 2) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def with_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (expanded(x.transpose(1, 2)) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=query[:, :1] @ key[:, :1].mT > 0)


def some_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, HEADS, LENGTH, SIZE), (2, LENGTH, GROUPS, SIZE), (2, LENGTH, GROUPS, SIZE))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def grouped_calls(function: Callable[..., Any]) -> tuple[int, int]:
    """Calls of attention in groups after the pass, and what is left of repetitions."""
    found: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        grouped = grouped_heads.group_heads(module, keep_random_numbers=False)
        found.extend(inner for inner in grouped.modules() if isinstance(inner, GraphModule))
        return module.forward

    gradsplit.compile(function, backend=note, fullgraph=True)(*some_inputs())
    nodes = [node for module in found for node in module.graph.nodes]
    calls = [node for node in nodes if node.target is attention_laid_out and node.kwargs.get("enable_gqa")]
    names = ("expand", "reshape", "repeat_interleave")
    return len(calls), sum(str(getattr(node.target, "__name__", node.target)) in names for node in nodes)


@pytest.fixture(autouse=True)
def kernels_take_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some of those for GPUs do."""
    monkeypatch.setattr(grouped_heads, "takes_groups", lambda *given: True)


GROUPED = [attend(expanded), attend(interleaved), attend(repeated_by_method), under_checkpoint, one_head]
LEFT = [attend(in_turns), attend(of_others), attend(changed_later), one_batch, with_mask]


@pytest.mark.parametrize("function", GROUPED)
def test_repeated_keys_and_values_are_read_once(function: Callable[..., Tensor]) -> None:
    assert grouped_calls(function) == (1, 0)


@pytest.mark.parametrize("function", LEFT)
def test_others_stay(function: Callable[..., Tensor]) -> None:
    assert grouped_calls(function)[0] == 0


@pytest.mark.parametrize("function", [*GROUPED, *LEFT])
def test_results_and_gradients_are_those_of_the_plain_call(function: Callable[..., Tensor]) -> None:
    check_call(function, *some_inputs())


def test_keys_of_inference_mode_that_change_after_they_are_repeated() -> None:
    def function(query: Tensor, key: Tensor) -> Tensor:
        repeated = interleaved(key)
        key.mul_(2)
        return scaled_dot_product_attention(query, repeated, repeated) + key.sum()

    both = []
    for run in (function, gradsplit.compile(function)):
        with torch.inference_mode():
            query, key = (x.detach().clone() for x in some_inputs()[:2])
            both.append(run(query, key.transpose(1, 2)))
    torch.testing.assert_close(both[1], both[0])
