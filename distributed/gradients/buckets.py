"""The gradients of one ``DistributedDataParallel`` module: the plan of their buckets, and its memory."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.distributed.collectives.averaging import Averaging
from gradsplit.distributed.collectives.measure_costs import ReadyTimes
from gradsplit.distributed.gradients.bucket_buffers import BucketBuffers, gradient_strides
from gradsplit.distributed.gradients.marks_of_use import MarksOfUse
from gradsplit.distributed.gradients.static_graph import StaticGraph
from gradsplit.distributed.optimizer_steps.step_in_backward import StepInBackward


class Watch(Protocol):
    """Knows of failures of the job."""

    def begins(self, what: str) -> None:
        """Notes what all ranks begin together."""
        ...

    def check_failures(self) -> None:
        """Raises a failure that has become known."""
        ...

    def wait(self, work: Any) -> None:
        """Waits for a collective that no stream waits for, and raises if another rank will not take part."""
        ...


class RoundObserver(Protocol):
    """Is called in a round, to measure it."""

    def gradients_arrived(self, names: Sequence[str]) -> None: ...

    def collective_starting(self, bucket: int) -> None: ...

    def collective_started(self, bucket: int, size_bytes: int, work: Any) -> None: ...


class Buckets:
    """Lives as long as the module; what belongs to one backward is a ``Round``.

    Args:
        parameters: those whose gradients are reduced, by name.
        group: over which ranks.
        averaging: how buckets are reduced.
        watch: over failures of ranks. Where streams wait, a collective that was aborted leaves numbers without meaning.
        stepper: steps an optimizer in the rounds, if one is to be.

    Attributes:
        device: where they are.
        strides: of the gradients that are not contiguous, as the parameters lay when this was made; programs are
            compiled for these.
        buffers, marks: the memory; ``None`` before the first plan.
        static_graph: what is known of all rounds, if the program says that they are alike.
        ready_times: measures rounds, in which everything is reduced last.
        observer: measures rounds, too.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        averaging: Averaging,
        watch: Watch,
        stepper: StepInBackward | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.device = next(iter(self.parameters.values())).device
        self._all_strides = {name: gradient_strides(parameter) for name, parameter in parameters.items()}
        self.strides = {
            name: strides
            for name, strides in self._all_strides.items()
            if strides != contiguous_strides(tuple(parameters[name].shape))
        }
        self.group = group
        self.averaging = averaging
        self.watch = watch
        self.wait = operator.methodcaller("wait") if averaging.on_streams else watch.wait
        self.stepper = stepper
        self.buffers: BucketBuffers | None = None
        self.marks: MarksOfUse | None = None
        self.static_graph: StaticGraph | None = None
        self.ready_times: ReadyTimes | None = None
        self.observer: RoundObserver | None = None

    @property
    def plan(self) -> BucketPlan | None:
        """The plan in use; ``None`` before the first."""
        return None if self.buffers is None else self.buffers.plan

    @property
    def shared_bytes(self) -> int:
        """Of the buckets that other ranks reach, which torch's allocator does not count."""
        return 0 if self.buffers is None else self.buffers.shared_bytes

    def adopt(self, plan: BucketPlan) -> None:
        """Uses this plan from now on, as all ranks do; gradients that lie in the buckets of the one before move. No
        backward is under way."""
        before = self.buffers
        self.buffers = BucketBuffers(plan, self.parameters, self._all_strides, self.averaging.allocate)
        self.marks = MarksOfUse(self.buffers)
        if before is None:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and before.hold(name, parameter.grad) and not before.is_kept(name):
                parameter.grad = self.buffers.places[name].copy_(parameter.grad)

    def empty_gradient(self, name: str) -> torch.Tensor:
        """Memory for what a program stores of a gradient, where it does not go to its place."""
        like = self.parameters[name]
        return torch.empty_strided(like.shape, self._all_strides[name], dtype=like.dtype, device=like.device)
