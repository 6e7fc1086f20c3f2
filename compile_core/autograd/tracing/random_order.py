"""Makes functional random operators draw in the order of their in-place forms.

``tensor.bernoulli_(p)``, and dropout with it, draws in the order of memory; ``aten.bernoulli.p``, into which
functionalization turns it, in the order of dims. The two differ where dims are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten


def memory_order(like: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """The dims of a tensor as they lie in memory, outermost first, and the permutation back from that order.

    ``None`` where they lie in order already, or not densely.
    """
    spec = TensorSpec.of(like)
    if spec.is_contiguous or not spec.is_dense:
        return None
    return spec.memory_order


def _bernoulli(like: torch.Tensor, p: float, *, generator: Any = None) -> Any:
    found = memory_order(like)
    if found is None:
        return NotImplemented
    order, back = found
    return aten.bernoulli.p(like.permute(order), p, generator=generator).permute(back)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {aten.bernoulli.p: _bernoulli}
