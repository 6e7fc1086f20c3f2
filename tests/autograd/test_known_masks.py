"""Attention masks that are known when a program is compiled: which are left out, and that results stay the same."""

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
from gradsplit.compile_core.autograd.captured_graphs.attention_calls import attention_laid_out
from gradsplit.compile_core.autograd.captured_graphs.fake_values import note_fake_values
from gradsplit.compile_core.autograd.captured_graphs.known_masks import simplify_masks
from gradsplit.compile_core.torch_facts.fakes_like import fakes_like

SIZE = 6


def everywhere(query: Tensor) -> Tensor:
    return (torch.arange(SIZE)[None, None, :, None] >= 0).expand(query.shape[0], -1, SIZE, SIZE)


def one_sequence_of_packed(query: Tensor) -> Tensor:
    """As a language model makes its mask for sequences that may be packed, from positions that are known."""
    positions = torch.arange(SIZE).unsqueeze(0).expand(query.shape[0], -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    sequence = (steps != 1).cumsum(-1)
    samples = torch.arange(query.shape[0])[:, None, None, None]
    rows, columns = torch.arange(SIZE)[None, None, :, None], torch.arange(SIZE)[None, None, None, :]
    seen = rows.new_ones((), dtype=torch.bool) & columns.le(rows)
    return (seen & (sequence[samples, rows] == sequence[samples, columns])).expand(-1, -1, SIZE, SIZE)


def added_infinity(query: Tensor) -> Tensor:
    return torch.full((SIZE, SIZE), -torch.inf, dtype=query.dtype).triu(1)[None, None]


def added_zero(query: Tensor) -> Tensor:
    return (1.0 - torch.ones_like(query[:, :1, :, :1])) * torch.finfo(query.dtype).min


def chosen(query: Tensor) -> Tensor:
    return torch.where(torch.ones(SIZE, SIZE, dtype=torch.bool).tril(), 0.0, -torch.inf)


def in_place(query: Tensor) -> Tensor:
    mask = torch.ones(SIZE, SIZE, dtype=torch.bool)
    mask[0, 1] = False
    return mask


def in_place_unseen(query: Tensor) -> Tensor:
    mask = torch.ones(SIZE, SIZE, dtype=torch.bool)
    mask.detach()[0].logical_not_()
    return mask


def large_number(query: Tensor) -> Tensor:
    return torch.full((SIZE, SIZE), torch.finfo(query.dtype).min).triu(1)


def some_rows_masked(query: Tensor) -> Tensor:
    return (torch.arange(SIZE) > 2)[:, None].expand(SIZE, SIZE)


def window(query: Tensor) -> Tensor:
    rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None, :]
    return (columns <= rows) & (rows - columns < 3)


def earlier(query: Tensor) -> Tensor:
    return torch.ones(SIZE, SIZE, dtype=torch.bool).triu()


def samples_that_differ(query: Tensor) -> Tensor:
    causal = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    return torch.stack([causal, causal.T])[:, None]


def of_data(query: Tensor) -> Tensor:
    return query[:, :, :, :1] < torch.inf


def inexact(query: Tensor) -> Tensor:
    """The quotients differ between devices in their last bit."""
    return ((torch.arange(SIZE) / 3.0).sin() < 2).expand(SIZE, SIZE)


def masked(mask: Callable[[Tensor], Tensor], **options: Any) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask(query), **options)

    return attend


def some_inputs(samples: int = 2, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(samples, 2, SIZE, 4, generator=generator, requires_grad=requires_grad) for _ in range(3)
    ]


def simplified(
    function: Callable[..., Any], *inputs: Tensor, keep_random_numbers: bool = False
) -> GraphModule:
    """The captured graph of a call after the stage."""
    graphs: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        graphs.append(simplify_masks(module, keep_random_numbers))
        return module.forward

    gradsplit.compile(function, backend=note, fullgraph=True)(*inputs)
    return graphs[0]


def flags(module: GraphModule) -> list[bool | None]:
    """``is_causal`` of the calls of attention that lost their mask; ``None`` for the others."""
    targets = (scaled_dot_product_attention, attention_laid_out)
    calls = [node for node in module.graph.nodes if node.target in targets]
    return [None if node.kwargs.get("attn_mask") is not None else node.kwargs["is_causal"] for node in calls]


LEFT_OUT = {
    everywhere: False,
    added_zero: False,
    one_sequence_of_packed: True,
    added_infinity: True,
    chosen: True,
}
KEPT = (
    in_place, in_place_unseen, large_number, some_rows_masked, window, earlier, samples_that_differ, of_data, inexact,
)  # fmt: skip


@pytest.mark.parametrize("mask", LEFT_OUT)
def test_a_mask_that_says_nothing_or_hides_later_positions_is_left_out(mask: Any) -> None:
    assert flags(simplified(masked(mask), *some_inputs())) == [LEFT_OUT[mask]]


@pytest.mark.parametrize("mask", KEPT)
def test_other_masks_stay(mask: Any) -> None:
    assert flags(simplified(masked(mask), *some_inputs())) == [None]


@pytest.mark.parametrize("mask", [*LEFT_OUT, *KEPT])
def test_results_and_gradients_are_those_of_the_plain_call(mask: Any) -> None:
    function, plain, ours = masked(mask), some_inputs(), some_inputs()
    expected, found = function(*plain), gradsplit.compile(function, backend="aot_eager")(*ours)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    for result in (expected, found):
        result.square().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in ours], [tensor.grad for tensor in plain])


def test_a_mask_that_changes_later_stays() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(SIZE, SIZE, dtype=torch.bool)
        result = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return result, mask.logical_not_()

    assert flags(simplified(attend, *some_inputs())) == [None]


def test_a_mask_is_left_out_and_returned() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
        return scaled_dot_product_attention(query, key, value, attn_mask=mask), mask

    inputs = some_inputs()
    assert flags(simplified(attend, *inputs)) == [True]
    torch.testing.assert_close(gradsplit.compile(attend, backend="aot_eager")(*inputs), attend(*inputs))


def test_a_mask_that_takes_gradients_stays() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(SIZE, SIZE, requires_grad=True)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask), mask

    assert flags(simplified(attend, *some_inputs())) == [None]


def test_a_mask_for_more_samples_is_the_error_that_it_is() -> None:
    def mask(query: Tensor) -> Tensor:
        return torch.ones(3, 1, SIZE, SIZE, dtype=torch.bool)

    graphs: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        graphs.append(simplify_masks(module, False))
        return module.forward

    with pytest.raises(RuntimeError, match="shape"):
        gradsplit.compile(masked(mask), backend=note)(*some_inputs(samples=1))
    assert flags(graphs[0]) == [None]


def test_a_mask_with_a_flag_beside_it_stays() -> None:
    """Which of the two counts, or that both are an error, is for torch to say."""
    attend = masked(chosen, is_causal=True)
    try:
        attend(*some_inputs())
    except RuntimeError:  # from torch 2.14 on
        with pytest.raises(RuntimeError, match="is_causal"):
            simplified(attend, *some_inputs())
    else:
        assert flags(simplified(attend, *some_inputs())) == [None]


def test_more_keys_than_queries_have_no_flag() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(3, SIZE, dtype=torch.bool).tril()
        return scaled_dot_product_attention(query[:, :, :3], key, value, attn_mask=mask)

    assert flags(simplified(attend, *some_inputs())) == [None]


def test_dropout_draws_what_it_draws_with_the_mask() -> None:
    function = masked(everywhere, dropout_p=0.5)
    assert flags(simplified(function, *some_inputs())) == [False]
    assert flags(simplified(function, *some_inputs(), keep_random_numbers=True)) == [None]


def test_a_mask_that_a_checkpoint_is_given_is_left_out_of_its_body() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return checkpoint(
            scaled_dot_product_attention, query, key, value, everywhere(query), use_reentrant=False
        )

    inputs = some_inputs()
    module = simplified(attend, *inputs)
    (body,) = [part for part in module.children() if isinstance(part, GraphModule)]
    assert flags(body) == [False]
    torch.testing.assert_close(gradsplit.compile(attend, backend="aot_eager")(*inputs), attend(*inputs))


def test_only_calls_that_change_are_copied() -> None:
    graphs: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        assert simplify_masks(module, False) is module
        graphs.append(module)
        return module.forward

    gradsplit.compile(masked(window), backend=note)(*some_inputs())
    assert len(graphs) == 1


def test_a_program_relies_on_the_layout_that_it_saw() -> None:
    query = torch.empty(2, 3, SIZE, 4)
    strides = (3 * SIZE * 4, 4, 12, 1)
    for wanted in (query.stride(), strides):
        result = attention_laid_out(query=query, key=query, value=query, attn_mask=None, strides=wanted)
        assert result.stride() == wanted


def test_graphs_that_did_not_come_from_a_capture_lose_their_masks_too() -> None:
    """One that was loaded, or cut out of another, has no values beside its calls."""
    seen: list[GraphModule] = []

    def note(module: GraphModule, examples: Any) -> Any:
        seen.append(module)
        return module.forward

    inputs = some_inputs()
    gradsplit.compile(masked(one_sequence_of_packed), backend=note, fullgraph=True)(*inputs)
    (module,) = seen
    expected = module(*inputs)[0]
    for node in module.graph.nodes:
        node.meta.clear()
    note_fake_values(module, fakes_like(inputs))
    simple = simplify_masks(module, keep_random_numbers=True)
    assert flags(simple) == [True]
    torch.testing.assert_close(simple(*inputs)[0], expected)
