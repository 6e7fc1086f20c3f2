"""Masks of attention whose last dim is not the innermost: they are copied where a fused kernel then takes them."""

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
from gradsplit.compile_core.autograd.captured_graphs import mask_rows
from gradsplit.compile_core.autograd.captured_graphs.attention_calls import attention_laid_out
from tests.autograd.compare_with_eager import check_call

HEADS, LENGTH, SIZE = 3, 5, 4


def by_position(query: Tensor, bias: Tensor) -> Tensor:
    """As T5 does: heads are innermost."""
    mask = bias.permute(2, 0, 1).unsqueeze(0)
    return scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)


def in_two_layers(query: Tensor, bias: Tensor) -> Tensor:
    mask = bias.permute(2, 0, 1).unsqueeze(0)
    query = scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)
    return scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)


def of_truth_values(query: Tensor, bias: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, query * 2, query, attn_mask=bias.permute(2, 0, 1) > -1)


def under_checkpoint(query: Tensor, bias: Tensor) -> Tensor:
    return checkpoint(by_position, query, bias, use_reentrant=False)


def in_rows(query: Tensor, bias: Tensor) -> Tensor:
    mask = bias.permute(2, 0, 1).contiguous()
    return scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)


def of_whole_rows(query: Tensor, bias: Tensor) -> Tensor:
    mask = bias[:, :1].permute(2, 0, 1).expand(HEADS, LENGTH, LENGTH)
    return scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)


def without(query: Tensor, bias: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, query * 2, query.sin()) * bias.sum()


COPIED = {by_position: 1, in_two_layers: 2, of_truth_values: 1, under_checkpoint: 1}
LEFT = dict.fromkeys([in_rows, of_whole_rows, without], 0)


def some_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, HEADS, LENGTH, SIZE), (LENGTH, LENGTH, HEADS))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.fixture(autouse=True)
def a_kernel_takes_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As one of those for GPUs does."""
    if request.node.get_closest_marker("gpu") is None:
        in_rows = lambda attention: attention.attn_mask.stride(-1) == 1  # noqa: E731
        monkeypatch.setattr(mask_rows, "takes_mask", in_rows)


@pytest.mark.parametrize(("function", "count"), {**COPIED, **LEFT}.items())
def test_which_are_copied(function: Callable[..., Tensor], count: int) -> None:
    found: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        changed = mask_rows.put_masks_in_rows(module, keep_random_numbers=False)
        assert (changed is module) == (count == 0)
        found.extend(inner for inner in changed.modules() if isinstance(inner, GraphModule))
        return module.forward

    gradsplit.compile(function, backend=note, fullgraph=True)(*some_inputs())
    nodes = [node for module in found for node in module.graph.nodes]
    calls = [node for node in nodes if node.target is attention_laid_out and node.kwargs["mask_in_rows"]]
    assert len(calls) == count


def test_masks_stay_where_random_numbers_do() -> None:
    def drops(query: Tensor, bias: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, query, query, bias.permute(2, 0, 1), dropout_p=0.1)

    def note(module: GraphModule, examples: Any) -> Any:
        assert mask_rows.put_masks_in_rows(module, keep_random_numbers=True) is module
        assert mask_rows.put_masks_in_rows(module, keep_random_numbers=False) is not module
        return module.forward

    gradsplit.compile(drops, backend=note, fullgraph=True)(*some_inputs())


@pytest.mark.parametrize("function", [*COPIED, *LEFT])
def test_results_and_gradients_are_those_of_the_plain_call(function: Callable[..., Tensor]) -> None:
    check_call(function, *some_inputs())


@pytest.mark.gpu
def test_a_fused_kernel_runs_on_a_gpu() -> None:
    """And it is as near to float64 as torch's way is."""

    def attend(query: Tensor, bias: Tensor) -> Tensor:
        mask = bias.permute(2, 0, 1).unsqueeze(0)
        with torch.autocast("cuda", torch.bfloat16):
            return scaled_dot_product_attention(query, query * 2, query.sin(), attn_mask=mask)

    given = [torch.randn(size, device="cuda", requires_grad=True) for size in ((2, 8, 64, 64), (64, 64, 8))]
    expected = attend(*(tensor.detach().double() for tensor in given))
    compiled = gradsplit.compile(attend)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        found = compiled(*given)
        found.float().square().sum().backward()
    assert any("fmha" in event.key for event in profile.key_averages())
    plain = [tensor.detach().clone().requires_grad_() for tensor in given]
    attend(*plain).float().square().sum().backward()
    assert (found - expected).abs().max() < 0.05
    for ours, theirs in zip(given, plain, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=0.05, atol=0.05 * float(theirs.grad.abs().max())
        )
