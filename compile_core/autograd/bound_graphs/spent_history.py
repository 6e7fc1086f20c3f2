"""Results through which no backward comes any more, since the program has made one itself: ``loss.backward(); return
loss``. In plain PyTorch they require gradients still, and a backward raises; so it does here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def with_spent_history(outputs: Sequence[Any], spent: Collection[int]) -> tuple[Any, ...]:
    """The outputs of a program, those at these positions as results of operators whose saved values are gone."""
    with torch.enable_grad():
        leaf = torch.empty(0, requires_grad=True)
        return tuple(
            _Spent.apply(output, leaf) if position in spent else output
            for position, output in enumerate(outputs)
        )


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(_MESSAGE)
