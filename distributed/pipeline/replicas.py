"""Replicas of a stage average their gradients, a bucket at a time, while the rank goes on with its other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.bucketing.bucket import Parameter
from gradsplit.bucketing.reducer_plan import reducer_plan


class ReplicaAverages:
    """The averages of one stage's gradients over its replicas.

    Args:
        parameters: of the stage, by name.
        group: of the ranks that have this stage.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        described = [
            Parameter(name, one.numel(), one.element_size(), str(one.dtype), str(one.device))
            for name, one in self._parameters.items()
        ]
        # The last weights of a stage are the first that have gradients.
        plan = reducer_plan(described[::-1]) if described else None
        self._buckets = (
            [] if plan is None else [[one.name for one in bucket.parameters] for bucket in plan.buckets]
        )
        self._started: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    def start(self) -> None:
        """The gradients are complete on this rank."""
        for names in self._buckets:
            found = [self._parameters[name].grad for name in names]
            gradients = [gradient for gradient in found if gradient is not None]
            if gradients:
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                self._started.append(
                    (gradients, flat, dist.all_reduce(flat, group=self._group, async_op=True))
                )

    def finish(self) -> None:
        """The gradients are averages from here on."""
        for gradients, flat, work in self._started:
            work.wait()
            flat /= dist.get_world_size(self._group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
        self._started.clear()
