"""Attention with scores that the program changes and masks, as one node: what ``flex_attention`` of torch becomes.

The functions ``score_mod`` and ``mask_mod`` are bodies over all scores at once: the first takes the matrix of scores
and returns the changed one, the second returns which of them count. Both read further tensors, which the node gets.
``dense_attention`` says what the node means, with autograd; it has all scores in memory, which kernels avoid.

Source: ``math_attention`` in ``torch/_higher_order_ops/flex_attention.py``, whose values these are. Statistics of the
rows are logarithms to the base of 2, a row without any score that counts has -inf and zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from gradsplit.compile_core.ir.higher_order import BodyFunction
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast

T = TypeVar("T")

# The tensors of a block mask, in the order in which an operator of torch's is given them.
BLOCK_LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionOptions:
    """What a node is given beside tensors.

    Attributes:
        scale: of the products of queries and keys.
        block_sizes: how many queries and keys a block of the block mask has.
        lists: which of ``BLOCK_LISTS`` the node gets, after query, key and value.
        num_read: how many tensors ``score_mod`` reads; they come after the lists, and those of ``mask_mod`` last.
    """

    scale: float
    block_sizes: tuple[int, int]
    lists: tuple[str, ...]
    num_read: int

    def split(self, tensors: Sequence[T], num_operands: int) -> tuple[Sequence[T], ...]:
        """So many operands, lists of blocks, what ``score_mod`` reads and what ``mask_mod`` does, or what stands for
        them."""
        second = num_operands + len(self.lists)
        third = second + self.num_read
        return tensors[:num_operands], tensors[num_operands:second], tensors[second:third], tensors[third:]


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors of a node by what they are."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lists: tuple[torch.Tensor, ...]
    score_reads: tuple[torch.Tensor, ...]
    mask_reads: tuple[torch.Tensor, ...]

    @staticmethod
    def of(options: AttentionOptions, tensors: Sequence[torch.Tensor]) -> AttentionTensors:
        """Those of a node in their order, cast where autocast is on."""
        operands, lists, score_reads, mask_reads = options.split(tensors, 3)
        query, key, value = map(_autocast, operands)
        return AttentionTensors(query, key, value, tuple(lists), tuple(score_reads), tuple(mask_reads))

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        return (self.query, self.key, self.value, *self.lists, *self.score_reads, *self.mask_reads)


def flex_attention(
    score_body: BodyFunction, mask_body: BodyFunction, options: AttentionOptions, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, its rows' logarithms of sums of exponentials, and their maxima, which have no gradients."""
    given = AttentionTensors.of(options, tensors)
    with without_autocast():
        return dense_attention(
            lambda scores: score_body(scores, *given.score_reads)[0],
            lambda: mask_body(*given.mask_reads)[0],
            options.scale,
            (given.query, given.key, given.value),
        )


def dense_attention(
    change: Callable[[torch.Tensor], torch.Tensor],
    keep: Callable[[], torch.Tensor],
    scale: float,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a node computes, by operators of torch's.

    Args:
        change: the changed scores.
        keep: which scores count.
        operands: query, key and value.
    """
    query, key, value = operands
    dtype = score_dtype(query)
    scores = query.to(dtype) @ for_all_queries(key, query).to(dtype).transpose(-2, -1)
    kept = keep()
    # What does not count has no gradient either, whatever the change makes of it.
    scores = torch.where(kept, scores * scale, 0.0)
    changed = torch.where(kept, change(scores), -math.inf)
    is_empty = torch.all(changed == -math.inf, dim=-1)
    # Through a row of nothing but infinities autograd would have gradients that are no numbers.
    sums = torch.logsumexp(torch.where(is_empty.unsqueeze(-1), 0.0, changed), dim=-1)
    sums = torch.where(is_empty, -math.inf, sums)
    maxima = torch.amax(changed.detach(), dim=-1)
    weights = torch.ops.aten._safe_softmax.default(changed, -1).to(query.dtype)
    result = weights @ for_all_queries(value, query).to(query.dtype)
    return laid_out_like(result, query), sums / math.log(2), maxima / math.log(2)


def score_dtype(query: torch.Tensor) -> torch.dtype:
    """Of the scores of these queries."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def for_all_queries(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values repeated for the queries' heads and batch."""
    repeated = torch.repeat_interleave(tensor, query.size(1) // tensor.size(1), dim=1)
    return repeated.expand(query.size(0), -1, -1, -1)


def laid_out_like(result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A result in the order of dims that the query has in memory, the elements of a row next to each other."""
    strides = query.stride()
    order = [*sorted(range(3), key=lambda dim: -strides[dim]), 3]
    back = sorted(range(4), key=order.__getitem__)
    return result.permute(order).contiguous().permute(back)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """As torch casts what the operator is given."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
