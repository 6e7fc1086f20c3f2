"""Puts calls that stay whole into a trace.

A trace stacks modes that understand operators only. So a kept call passes through them as a call of one operator with a
number; when the trace has ended, the node gets the call itself for a target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from gradsplit.compile_core.ir.kept_calls import OPERATOR, KeptCall

_numbers = itertools.count()
_being_traced: dict[int, KeptCall] = {}


@torch.library.register_fake("gradsplit::kept_call")
def _example(inputs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return _being_traced[number].example()


@dataclass(frozen=True)
class DifferentiableCall:
    """A kept call and the one that computes its gradients.

    Attributes:
        forward: takes the tensors.
        backward: takes the tensors and then a gradient for each floating-point result; returns a gradient for each
            tensor that requires one.
    """

    forward: KeptCall
    backward: KeptCall


class KeptCalls:
    """The kept calls of one trace."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def call(self, kept: KeptCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Record a call; the results are new tensors without a history."""
        number = next(_numbers)
        _being_traced[number] = kept
        self._numbers.append(number)
        with torch.no_grad():
            return OPERATOR([tensor.detach() for tensor in tensors], number)

    def call_with_gradients(
        self, kept: DifferentiableCall, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Record a call whose results depend on the tensors for autograd."""
        return _WithGradients.apply(self, kept, *tensors)  # type: ignore[return-value]

    def settle(self, module: GraphModule) -> None:
        """Give the recorded nodes of a traced graph their own targets."""
        for node in module.graph.find_nodes(op="call_function", target=OPERATOR):
            inputs, number = node.args
            node.target, node.args = _being_traced[number], (inputs,)

    def forget(self) -> None:
        for number in self._numbers:
            del _being_traced[number]


@contextmanager
def kept_calls() -> Iterator[KeptCalls]:
    """The calls that are recorded in a trace, which ends within."""
    calls = KeptCalls()
    try:
        yield calls
    finally:
        calls.forget()


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, calls: KeptCalls, kept: DifferentiableCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = calls.call(kept.forward, tensors)
        ctx.calls, ctx.kept = calls, kept
        ctx.is_differentiable = [takes_gradients(result) for result in results]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in results if not takes_gradients(result)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        arriving = [
            gradient for gradient, wanted in zip(gradients, ctx.is_differentiable, strict=True) if wanted
        ]
        found = iter(ctx.calls.call(ctx.kept.backward, [*ctx.saved_tensors, *arriving]))
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(next(found) if need else None for need in needed))


def takes_gradients(tensor: torch.Tensor) -> bool:
    """Whether gradients flow back into a result of a kept call."""
    return tensor.is_floating_point() or tensor.is_complex()
