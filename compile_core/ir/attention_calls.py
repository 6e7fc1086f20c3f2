"""Attention with changed scores in a traced graph: a call forward and a call backward, which hold functions of scores.

Each is a ``KeptCall``, whose function has all scores in memory, by torch's kernels. Where there are kernels that do not
(``lowering/attention``), they run instead. The backward knows a row by its logarithm of the sum of exponentials, and by
``delta``, the sum of the products of result and gradient, less the gradient of that logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch.fx import GraphModule

from gradsplit.compile_core.ir.flex_attention import (
    AttentionOptions,
    dense_attention,
    for_all_queries,
    score_dtype,
)
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

Part = Literal["forward", "backward"]
T = TypeVar("T")

# How many tensors come before the lists of blocks. Forward: query, key, value. Backward: these, the gradient of the
# result, the logarithms of the sums, delta.
NUM_OPERANDS: dict[Part, int] = {"forward": 3, "backward": 6}


class AttentionCall(KeptCall):
    """One of the two calls.

    Attributes:
        part: forward, which returns result, logarithms of sums, and maxima; or backward, which returns the gradients of
            query, key and value.
        options: see there; the tensors are in the same order, with others after the value in the backward.
        scores: an ATen graph from scores and what ``score_mod`` reads to changed scores, all of them at once; in the
            backward from a gradient of these, too, which comes last, to the gradient of the scores, which comes second.
        mask: an ATen graph from what ``mask_mod`` reads to which scores count.
    """

    depends_on_data = False

    def __init__(
        self,
        part: Part,
        options: AttentionOptions,
        scores: GraphModule,
        mask: GraphModule,
        results: Sequence[TensorSpec],
    ) -> None:
        run = self._forward if part == "forward" else self._backward
        super().__init__("flex_attention" if part == "forward" else "flex_attention_backward", run, results)
        self.part: Part = part
        self.options = options
        self.scores = scores
        self.mask = mask

    def split(self, tensors: Sequence[T]) -> tuple[Sequence[T], ...]:
        """See ``AttentionOptions``."""
        return self.options.split(tensors, NUM_OPERANDS[self.part])

    def _forward(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        (query, key, value), _, score_reads, mask_reads = self.split(tensors)
        return dense_attention(
            lambda scores: self.scores(scores, *score_reads)[0],
            lambda: self.mask(*mask_reads)[0],
            self.options.scale,
            (query, key, value),
        )

    def _backward(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        (query, key, value, gradient, sums, delta), _, score_reads, mask_reads = self.split(tensors)
        dtype, scale = score_dtype(query), self.options.scale
        keys, values = (for_all_queries(tensor, query) for tensor in (key, value))
        kept = self.mask(*mask_reads)[0]
        scores = query.to(dtype) @ keys.to(dtype).transpose(-2, -1)
        scores = torch.where(kept, scores * scale, 0.0)
        changed = self.scores(scores, *score_reads, torch.zeros_like(scores))[0]
        changed = torch.where(kept, changed, -math.inf) / math.log(2)
        is_empty = (sums == -math.inf).unsqueeze(-1)
        weights = torch.where(is_empty, 0.0, torch.exp2(changed - sums.unsqueeze(-1)))
        arriving = gradient.to(dtype) @ values.to(dtype).transpose(-2, -1)
        arriving = weights * (arriving - delta.unsqueeze(-1))
        of_scores = torch.where(kept, self.scores(scores, *score_reads, arriving)[1], 0.0) * scale
        of_scores = of_scores.to(query.dtype)
        of_key = of_scores.transpose(-2, -1) @ query
        of_value = weights.to(query.dtype).transpose(-2, -1) @ gradient
        return of_scores @ keys, _of_heads(of_key, key), _of_heads(of_value, value)


def _of_heads(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values that several heads of queries share."""
    return gradient.unflatten(1, (tensor.size(1), -1)).sum(2)
