"""Which gradients of a joint trace count as arrived together with others, as torch's engine sees it.

Source: ``torch.autograd.function.FunctionCtx.set_materialize_grads``, for custom functions. One that is to get ``None``
for what does not arrive gets zeros here, of which nothing is computed that reaches a gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL
from gradsplit.compile_core.autograd.tracing.record_operators import OperatorRecorder

Gradients = Sequence[torch.Tensor | None]

# Threads may trace side by side, and a trace may hold another.
_one_at_a_time = threading.RLock()


@contextmanager
def noted_functions_with_none() -> Iterator[WeakSet[Any]]:
    """Collects the nodes that ask for ``None``: torch keeps the answer where nobody can read it."""
    found: WeakSet[Any] = WeakSet()
    with _one_at_a_time:
        original = FunctionCtx.set_materialize_grads

        def set_and_note(self: Any, value: bool) -> None:
            original(self, value)
            (found.discard if value else found.add)(self)

        FunctionCtx.set_materialize_grads = set_and_note  # type: ignore[method-assign]
        try:
            yield found
        finally:
            FunctionCtx.set_materialize_grads = original  # type: ignore[method-assign]


def join_arrivals(nodes: Iterable[Any], with_none: WeakSet[Any], recorder: OperatorRecorder) -> None:
    """Makes what nodes compute depend on what comes to them, as it does for torch's engine.

    The gradients that come to a custom function depend on one another if it gets zeros for absent ones, and a gradient
    that is a constant, such as a sign's, depends on those that it is computed for.
    """

    def of_constants(computed: Gradients, gradients: Gradients) -> Gradients | None:
        if all(gradient is None or recorder.comes_from_seeds(gradient) for gradient in computed):
            return None
        arrived = [gradient for gradient in gradients if gradient is not None]
        return tuple(
            gradient
            if gradient is None or recorder.comes_from_seeds(gradient)
            else JOINT_ARRIVAL(gradient, arrived, recorder.is_without_memory(gradient))
            for gradient in computed
        )

    for node in nodes:
        node.register_hook(of_constants)
        if isinstance(node, BackwardCFunction) and node not in with_none:
            node.register_prehook(_joined)


def _joined(gradients: Gradients) -> Gradients | None:
    arrived = [gradient for gradient in gradients if gradient is not None]
    if len(arrived) < 2:
        return None
    return tuple(
        None
        if gradient is None
        else JOINT_ARRIVAL(gradient, [other for other in arrived if other is not gradient])
        for gradient in gradients
    )
