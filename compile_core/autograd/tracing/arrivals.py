"""Which gradients of a joint trace count as arrived together with others, as torch's engine sees it.

Source: ``torch.autograd.function.FunctionCtx.set_materialize_grads``, for custom functions. One that is to get ``None``
for what does not arrive gets zeros here, of which nothing is computed that reaches a gradient.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from gradsplit.compile_core.autograd.operators.joint_arrival import JOINT_ARRIVAL
from gradsplit.compile_core.autograd.tracing.record_operators import OperatorRecorder
from gradsplit.compile_core.torch_facts.wrapper_tensors import WrapperForm, inner_tensors

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


def join_arrivals(
    reached: Mapping[Any, int],
    seeds: Sequence[torch.Tensor],
    with_none: WeakSet[Any],
    recorder: OperatorRecorder,
) -> None:
    """Makes what nodes compute depend on what comes to them, as it does for torch's engine.

    The engine runs a node as soon as it has come to any root that leads to it, with a gradient or with none. Nodes of
    torch compute nothing of what is undefined. A custom function is called all the same, and gets zeros if it did not
    ask for ``None``. A gradient that is a constant, such as a sign's, depends on those that it is computed for.

    Args:
        reached: the nodes, with the positions of the roots that lead to them; see ``reaching_roots``.
        seeds: the gradients of the roots.
    """
    for node, positions in reached.items():
        is_custom = isinstance(node, BackwardCFunction)
        leading = [seed for k, seed in enumerate(seeds) if positions >> k & 1] if is_custom else []
        node.register_hook(functools.partial(_constants_joined, recorder, leading))
        if is_custom and node not in with_none:
            node.register_prehook(functools.partial(_all_joined, leading))


def _constants_joined(
    recorder: OperatorRecorder, leading: Sequence[torch.Tensor], computed: Gradients, arrived: Gradients
) -> Gradients | None:
    def joined(gradient: torch.Tensor) -> torch.Tensor:
        if recorder.comes_from_seeds(gradient):
            return gradient
        return JOINT_ARRIVAL(gradient, others, recorder.is_without_memory(gradient), bool(leading))

    def come(gradient: torch.Tensor) -> bool:
        return all(map(recorder.comes_from_seeds, _flowing(gradient)))

    if all(gradient is None or come(gradient) for gradient in computed):
        return None
    given = leading or [gradient for gradient in arrived if gradient is not None]
    others = [inner for gradient in given for inner in _flowing(gradient)]
    return tuple(None if gradient is None else _of_inner(joined, gradient) for gradient in computed)


def _all_joined(leading: Sequence[torch.Tensor], gradients: Gradients) -> Gradients:
    def joined(gradient: torch.Tensor) -> torch.Tensor:
        return JOINT_ARRIVAL(gradient, leading, False, True)

    return tuple(None if gradient is None else _of_inner(joined, gradient) for gradient in gradients)


def _flowing(gradient: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the data of a gradient: itself, or what flows of a wrapper."""
    form = WrapperForm.of(gradient)
    flags = [True] if form is None else form.takes
    return [inner for inner, flows in zip(inner_tensors(gradient), flags, strict=True) if flows]


def _of_inner(function: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """What a function makes of a gradient; of a wrapper one of what it makes of the inner tensors."""
    form = WrapperForm.of(gradient)
    if form is None:
        return function(gradient)
    parts = zip(inner_tensors(gradient), form.takes, strict=True)
    return form.build([function(inner) if flows else inner for inner, flows in parts])
