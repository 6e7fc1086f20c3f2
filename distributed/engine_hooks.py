"""Gradients that reach parameters through torch's autograd engine instead of a compiled backward.

Two kinds do. *Stray* gradients: the loss uses a parameter outside the compiled module too, as weight decay written into
the loss does; each is averaged over ranks before it is accumulated, so the sum is what stock DDP computes. *Eager*
gradients: this rank ran a call of the module in plain Python, for instance after a change that could not be captured;
all buckets are then reduced when the backward ends, in the plan's order, which is what the other ranks expect.

As in stock DDP, a backward whose forward did not go through the wrapped module is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from distributed.gradient_buckets import GradientBuckets


class EngineHooks:
    """Watches the parameters' gradient accumulation; lives as long as the compiled module."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._expecting_eager = False
        self._queued = False
        # Nobody else keeps these alive, and hooks go with them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in buckets.parameters.values()]
        for node in self._nodes:
            node.register_prehook(self._reduce_stray)
            node.register_hook(self._note_arrival())

    def expect_eager(self) -> None:
        """The module ran in plain Python: its next backward reduces all buckets when it ends."""
        self._expecting_eager = True

    def _reduce_stray(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if not self._buckets.expecting:
            return gradients
        return tuple(
            None if gradient is None else self._buckets.reduce_alone(gradient) for gradient in gradients
        )

    def _note_arrival(self) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if self._expecting_eager and not self._queued:
                self._queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._reduce_all)

        return note

    def _reduce_all(self) -> None:
        buckets = self._buckets
        self._expecting_eager = self._queued = False
        for name, parameter in buckets.parameters.items():
            place = buckets.destination(name)
            if parameter.grad is None:
                place.zero_()
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
            place.mul_(buckets.factor)
        for bucket in buckets.plan.buckets:
            buckets.start(bucket.index)
        for bucket in buckets.plan.buckets:
            buckets.wait(bucket.index)
        buckets.finish()
