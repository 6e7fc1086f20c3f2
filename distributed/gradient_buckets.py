"""Flat gradient buffers and their all-reduces: the communicator of a compiled backward.

Kernels write gradients straight into the buckets; afterwards ``param.grad`` is a view of its bucket. What the
parameter's gradient held before, from earlier backwards under ``no_sync()`` or without ``zero_grad()``, is added before
the bucket is reduced: the mean of the sums is what stock DDP computes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bucketing.bucket import BucketPlan


class CollectiveObserver(Protocol):
    """Told before and after a bucket's all-reduce is started, to draw a measured step."""

    def collective_starting(self, bucket: int) -> None: ...

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None: ...


class GradientBuckets:
    """The buffers of a plan, for the parameters of one ``DistributedDataParallel`` module.

    Attributes:
        factor: what a gradient must be multiplied with when it is stored, so that the reduced bucket is the mean over
            ranks. 1 where the collective itself averages.
        expecting: a compiled forward ran whose backward has not ended yet.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        averages = dist.get_backend(group) == "nccl"
        self.plan = plan
        self.parameters = dict(parameters)
        self.group = group
        self.factor = 1.0 if averages else 1.0 / group.size()
        self.expecting = False
        self.observer: CollectiveObserver | None = None
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._buffers: list[torch.Tensor] = []
        self._gradients: dict[str, torch.Tensor] = {}
        for bucket in plan.buckets:
            like = self.parameters[bucket.parameters[0].name]
            buffer = torch.zeros(bucket.numel, dtype=like.dtype, device=like.device)
            self._buffers.append(buffer)
            for parameter, offset in zip(bucket.parameters, bucket.offsets_elements, strict=True):
                shape = self.parameters[parameter.name].shape
                self._gradients[parameter.name] = buffer[offset : offset + parameter.numel].view(shape)
        self._accumulated: dict[str, torch.Tensor] = {}
        self._works: dict[int, Any] = {}

    def destination(self, name: str) -> torch.Tensor:
        """The place of a parameter's gradient in its bucket."""
        return self._gradients[name]

    def begin(self) -> None:
        """Puts aside what the gradients hold, for kernels are about to overwrite the buckets."""
        # Only a backward that raised half way leaves these; every rank started them, so they do end.
        for bucket in list(self._works):
            self.wait(bucket)
        self._accumulated.clear()
        for name, parameter in self.parameters.items():
            held = parameter.grad
            if held is not None:
                mine = held.untyped_storage().data_ptr() == self._gradients[name].untyped_storage().data_ptr()
                self._accumulated[name] = held.clone() if mine else held
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def start(self, bucket: int) -> None:
        if self._accumulated:
            for parameter in self.plan.buckets[bucket].parameters:
                held = self._accumulated.get(parameter.name)
                if held is not None:
                    self._gradients[parameter.name].add_(held, alpha=self.factor)
        buffer = self._buffers[bucket]
        if self.observer is not None:
            self.observer.collective_starting(bucket)
        work = dist.all_reduce(buffer, self._operation, group=self.group, async_op=True)
        self._works[bucket] = work
        if self.observer is not None:
            self.observer.collective_started(bucket, buffer.numel() * buffer.element_size(), work)

    def wait(self, bucket: int) -> None:
        self._works.pop(bucket).wait()

    def finish(self) -> None:
        """Makes every parameter's gradient the reduced one; a gradient that existed keeps its tensor."""
        for name, parameter in self.parameters.items():
            held = parameter.grad
            reduced = self._gradients[name]
            if held is None:
                parameter.grad = reduced
            elif held is not reduced:
                held.copy_(reduced)
        self._accumulated.clear()

    def _end_backward(self) -> None:
        self.expecting = False

    def reduce_alone(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a gradient that is in no bucket; waits for it."""
        reduced = gradient.detach().mul(self.factor)
        dist.all_reduce(reduced, self._operation, group=self.group)
        return reduced
