"""Custom functions of several results in a joint trace: which of them get zeros for gradients that do not arrive.

Source: ``torch.autograd.function.FunctionCtx.set_materialize_grads``. A function that is to get ``None`` instead gets
zeros here, of which nothing is computed that reaches a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL

Gradients = Sequence[torch.Tensor | None]


@contextmanager
def noted_functions_with_none() -> Iterator[WeakSet[Any]]:
    """Collects the nodes that ask for ``None``: torch keeps the answer where nobody can read it."""
    found: WeakSet[Any] = WeakSet()
    original = FunctionCtx.set_materialize_grads

    def set_and_note(self: Any, value: bool) -> None:
        original(self, value)
        (found.discard if value else found.add)(self)

    FunctionCtx.set_materialize_grads = set_and_note  # type: ignore[method-assign]
    try:
        yield found
    finally:
        FunctionCtx.set_materialize_grads = original  # type: ignore[method-assign]


def join_arrivals(nodes: Iterable[Any], with_none: WeakSet[Any]) -> None:
    """Makes the gradients that come to a node depend on one another, for the nodes that get zeros for absent ones."""
    for node in nodes:
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
