"""``torch.cond`` and ``torch.while_loop`` as nodes: the tensor that decides is looked at when the node runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gradsplit.compile_core.ir.higher_order import BodyFunction
from gradsplit.compile_core.torch_facts.higher_order_operators import cond_operator, while_loop_operator


def cond(
    predicate: torch.Tensor, on_true: BodyFunction, on_false: BodyFunction, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The results of one of two bodies, as tensors of their own that depend on all tensors for autograd.

    ``predicate`` has one element, of any dtype; results have the same shapes, strides and dtypes from both bodies.
    """
    if isinstance(predicate, FakeTensor):
        return cond_example(predicate, on_true, on_false, *tensors)
    return _as_new_tensors((on_true if predicate else on_false)(*tensors), tensors)


def cond_example(
    predicate: torch.Tensor, on_true: BodyFunction, on_false: BodyFunction, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What ``cond`` returns for fake tensors: both bodies give the same metadata."""
    del predicate, on_false
    return _as_new_tensors(on_true(*tensors), tensors)


def while_loop(
    condition: BodyFunction, step: BodyFunction, num_carried: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``carried = step(*carried)`` as long as ``condition(*carried)`` holds; not differentiable.

    The first ``num_carried`` tensors are carried, the others are read by both bodies.
    """
    if isinstance(tensors[0], FakeTensor):
        return while_loop_example(condition, step, num_carried, *tensors)
    carried, lifted = tensors[:num_carried], tensors[num_carried:]
    while condition(*carried, *lifted)[0]:
        carried = step(*carried, *lifted)
    return _apart(carried, tensors)


def while_loop_example(
    condition: BodyFunction, step: BodyFunction, num_carried: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What ``while_loop`` returns for fake tensors: ``step`` keeps the metadata."""
    del condition
    return _apart(step(*tensors), tensors)


def _apart(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results, with copies of those that lie in the memory of a tensor or of an earlier result."""
    copied = set(positions_in_shared_memory(results, tensors))
    return tuple(value.clone() if k in copied else value for k, value in enumerate(results))


def positions_in_shared_memory(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which results lie in the memory of a tensor or of an earlier result."""
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    shared = []
    for position, result in enumerate(results):
        memory = result.untyped_storage()._cdata
        if memory in known:
            shared.append(position)
        known.add(memory)
    return shared


def _as_new_tensors(
    results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    own = _apart(results, tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Depend.apply(len(own), *own, *tensors)  # type: ignore[return-value]
    return own


class _Depend(torch.autograd.Function):
    """Makes results depend on tensors that the body may not have read; the gradients of these are zeros then."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*values[count:])
        return tuple(value.view_as(value) for value in values[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[1 + len(gradients) :]
        zeros = [
            torch.zeros_like(t) if need else None for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        return (None, *gradients, *zeros)


# The data decide how these run, so no trace can go through them. The last two are what torch's own front end writes.
DATA_DEPENDENT = (cond, while_loop, cond_operator, while_loop_operator)
