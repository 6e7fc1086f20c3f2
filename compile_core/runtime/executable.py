"""Runs a schedule: compute regions, and the collectives between them.

This is the hot path of a step, though a thin one: a schedule has a dozen steps, and the kernels of a region
are called by the region itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compile_core.errors import InternalError
from compile_core.ir.schedule import Compute, Schedule, StartCollective, WaitCollective
from compile_core.runtime.communicator import Communicator, RegionObserver

# A compiled region: takes the inputs and then the destinations, in the order of the ``Compute``; returns its
# outputs, with the destination itself as the value of an output that was stored there. The list that it is
# given is its own: a region empties it to free each input after its last use. Gradients are off where it is called.
Region = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass
class Executable:
    """A linked schedule: called with what ``schedule.inputs`` names, it returns ``schedule.outputs``.

    The list of inputs is emptied, so that memory that nobody else holds is free after its last use.
    """

    schedule: Schedule
    regions: Mapping[str, Region]
    communicator: Communicator | None
    observer: RegionObserver | None = None
    _last_reads: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _unread: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _only: Region | None = field(default=None, repr=False)

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if self._only is not None and self.observer is None:
            return self._only(inputs)
        values = dict(zip(self.schedule.inputs, inputs, strict=True))
        inputs.clear()
        communicator, observer = self.communicator, self.observer
        if communicator is not None:
            communicator.begin()
        for position, step in enumerate(self.schedule.steps):
            if isinstance(step, Compute):
                arguments = [values[name] for name in step.inputs]
                for name in self._last_reads[position]:
                    del values[name]
                if communicator is not None:
                    arguments += [communicator.destination(name) for name in step.destinations.values()]
                if observer is not None:
                    observer.region_started(step.name)
                results = self.regions[step.name](arguments)
                if observer is not None:
                    observer.region_finished(step.name)
                values.update(zip(step.outputs, results, strict=True))
                del arguments, results
                for name in self._unread[position]:
                    del values[name]
            else:
                assert communicator is not None
                if isinstance(step, StartCollective):
                    communicator.start(step.bucket)
                else:
                    communicator.wait(step.bucket)
        if communicator is not None:
            communicator.finish()
        return [None if name is None else values[name] for name in self.schedule.outputs]


def link(schedule: Schedule, regions: Mapping[str, Region], communicator: Communicator | None) -> Executable:
    """Joins a schedule with its compiled regions and, where it has collectives, with the communicator.

    Raises:
        InternalError: a region is missing, or the schedule needs a communicator and there is none.
    """
    missing = [step.name for step in schedule.computes if step.name not in regions]
    if missing:
        raise InternalError(f"schedule {schedule.name} has no compiled region for {missing}")
    reduces = any(
        bool(step.destinations)
        if isinstance(step, Compute)
        else isinstance(step, (StartCollective, WaitCollective))
        for step in schedule.steps
    )
    if reduces and communicator is None:
        raise InternalError(f"schedule {schedule.name} reduces gradients, but no communicator was given")
    last_reads, unread = _lifetimes(schedule)
    return Executable(
        schedule,
        regions,
        communicator if reduces else None,
        _last_reads=last_reads,
        _unread=unread,
        _only=None if reduces else _only_region(schedule, regions),
    )


def _only_region(schedule: Schedule, regions: Mapping[str, Region]) -> Region | None:
    """The region that is all of the schedule, if there is one: it needs nobody to pass values on."""
    if len(schedule.steps) != 1:
        return None
    (step,) = schedule.steps
    if not isinstance(step, Compute) or (step.inputs, step.outputs) != (schedule.inputs, schedule.outputs):
        return None
    return regions[step.name]


def _lifetimes(schedule: Schedule) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """By position of the region: the values that it is the last to read, and those of its own that nothing
    reads."""
    last_reads: dict[int, tuple[str, ...]] = {}
    unread: dict[int, tuple[str, ...]] = {}
    needed = {name for name in schedule.outputs if name is not None}
    for position, step in reversed(list(enumerate(schedule.steps))):
        if isinstance(step, Compute):
            unread[position] = tuple(name for name in step.outputs if name not in needed)
            last_reads[position] = tuple(name for name in step.inputs if name not in needed)
            needed.update(step.inputs)
    return last_reads, unread
