"""What gradients held before a round: from backwards under ``no_sync()``, without ``zero_grad()``, or the user's own.

It is part of what the round averages. A gradient that a program stores in the bucket, where an earlier one may lie, has
that set aside; the engine adds to one where it is. A tensor of the user's stays the gradient, with the mean in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gradsplit.distributed.gradients.bucket_buffers import BucketBuffers


class EarlierGradients:
    """Of one round.

    Args:
        parameters: by name.
        buffers: of the buckets.

    Attributes:
        before: what ``param.grad`` was.
        aside: of those that are no gradients in the meantime, the values.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], buffers: BucketBuffers) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._users: set[str] = set()
        self.before: dict[str, torch.Tensor] = {}
        self.aside: dict[str, torch.Tensor] = {}

    def note(self, name: str, gradient: torch.Tensor, is_left: bool) -> None:
        """The engine adds to the gradient where it is, or else it ``is_left`` alone."""
        self.before[name] = gradient
        is_mine = self._buffers.hold(name, gradient)
        if not is_mine:
            self._users.add(name)
        if is_left:
            self.aside[name] = gradient.clone() if is_mine else gradient
            self._parameters[name].grad = None

    def is_users(self, name: str) -> bool:
        """Whether it was a tensor of the user's, which then stays the gradient."""
        return name in self._users

    def of_users(self) -> list[torch.Tensor]:
        """Those tensors."""
        return [gradient for name, gradient in self.before.items() if name in self._users]

    def give(self, name: str, used_by_none: Collection[str]) -> None:
        """Sets the gradient: the mean, but where no rank has one."""
        if name in used_by_none:
            if name in self.aside:
                self._parameters[name].grad = self.aside[name]
        elif name in self._users:
            self._parameters[name].grad = self.before[name].copy_(self._buffers.places[name])
        else:
            self._parameters[name].grad = self._buffers.places[name]

    def put_back(self) -> None:
        """The round has reduced nothing."""
        for name in self.aside:
            self._parameters[name].grad = self.before[name]

    def restore(self) -> None:
        """The round broke off, and buckets may be under way: what lay there are copies now."""
        for name, before in self.before.items():
            if name in self.aside or (self._parameters[name].grad is None and name in self._users):
                self._parameters[name].grad = self.aside.get(name, before)
