"""Runs a schedule: compute regions, and the collectives between them.

This is the hot path of a step, though a thin one: a schedule has a dozen steps, and the kernels of a region are called
by the region itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compile_core.errors import InternalError
from compile_core.ir.schedule import Compute, Schedule, StartCollective, WaitCollective
from compile_core.runtime.communicator import Communicator, RegionObserver

# A compiled region: takes the inputs and then the destinations, in the order of the ``Compute``; returns its outputs,
# with the destination itself as the value of an output that was stored there.
Region = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass
class Executable:
    """A linked schedule, called with the tensors that ``schedule.inputs`` names; returns ``schedule.outputs``."""

    schedule: Schedule
    regions: Mapping[str, Region]
    communicator: Communicator | None
    observer: RegionObserver | None = None
    _last_uses: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = dict(zip(self.schedule.inputs, inputs, strict=True))
        communicator, observer = self.communicator, self.observer
        if communicator is not None:
            communicator.begin()
        for position, step in enumerate(self.schedule.steps):
            if isinstance(step, Compute):
                arguments = [values[name] for name in step.inputs]
                arguments += [communicator.destination(name) for name in step.destinations.values()]
                if observer is not None:
                    observer.region_started(step.name)
                results = self.regions[step.name](arguments)
                if observer is not None:
                    observer.region_finished(step.name)
                values.update(zip(step.outputs, results, strict=True))
                del arguments, results
                for name in self._last_uses[position]:
                    del values[name]
            elif isinstance(step, StartCollective):
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
    collective = any(isinstance(step, (StartCollective, WaitCollective)) for step in schedule.steps)
    if communicator is None and (collective or any(step.destinations for step in schedule.computes)):
        raise InternalError(f"schedule {schedule.name} reduces gradients, but no communicator was given")
    return Executable(schedule, regions, communicator if collective else None, _last_uses=_last_uses(schedule))


def _last_uses(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    """For each step, the values that nothing needs after it: memory is freed as early as possible."""
    last: dict[str, int] = {}
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            last.update(dict.fromkeys((*step.inputs, *step.outputs), position))
    kept = set(schedule.outputs)
    freed: dict[int, list[str]] = {position: [] for position in range(len(schedule.steps))}
    for name, position in last.items():
        if name not in kept:
            freed[position].append(name)
    return {position: tuple(names) for position, names in freed.items()}
