"""Memory that works on one stream need, and share."""

from __future__ import annotations

import weakref

import torch


class Scratch:
    """Works that run one after the other may use the same memory, as long as one of them still holds it."""

    def __init__(self) -> None:
        # By dtype, with the stream for which it was allocated.
        self._held: dict[torch.dtype, tuple[weakref.ref[torch.Tensor], object]] = {}

    def take(self, like: torch.Tensor, owner: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory like a one-dimensional tensor.

        Args:
            owner: the stream that is current, for which new memory is allocated. Other streams' is not shared: they
                wait for other works.

        Returns:
            What the work must hold until it is over, and the memory, which is a part of that.
        """
        reference, of_stream = self._held.get(like.dtype, (None, None))
        held = None if reference is None or of_stream is not owner else reference()
        if held is None or held.numel() < like.numel():
            held = torch.empty_like(like)
            self._held[like.dtype] = weakref.ref(held), owner
        return held, held[: like.numel()]
