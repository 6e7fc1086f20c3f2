"""Runs a schedule: compute regions, and the news between them of what has been stored for others.

This is the hot path of a step, though a thin one: a schedule has a dozen steps, and the kernels of a region
are called by the region itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.communicator import Destinations, RegionObserver
from gradsplit.compile_core.ir.pick import picker
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory, sharing

# A compiled region: takes the inputs and then the destinations, in the order of the ``Compute``; returns its
# outputs, with the destination itself as the value of an output that was stored there. The list that it is
# given is its own: a region empties it to free each input after its last use. Gradients are off where it is called.
Region = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass
class Executable:
    """A linked schedule: called with what ``schedule.inputs`` names, it returns ``schedule.outputs``.

    Where it stores for a communicator, it is given the destinations of the run, too.

    The list of inputs is emptied, so that memory that nobody else holds is free after its last use.
    """

    schedule: Schedule
    regions: Mapping[str, Region]
    observer: RegionObserver | None = None
    _last_reads: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _unread: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    # By region, the names of its destinations.
    _stored: Sequence[tuple[str, ...]] = field(default=(), repr=False)
    _only: Region | None = field(default=None, repr=False)

    def __call__(
        self, inputs: list[torch.Tensor], destinations: Destinations | None = None
    ) -> Sequence[torch.Tensor | None]:
        if self._only is not None and self.observer is None:
            return self._only(inputs)
        values = dict(zip(self.schedule.inputs, inputs, strict=True))
        inputs.clear()
        observer = self.observer
        for position, compute in enumerate(self.schedule.computes):
            arguments = [values[name] for name in compute.inputs]
            for name in self._last_reads[position]:
                del values[name]
            stored = self._stored[position]
            if destinations is not None:
                arguments += destinations.destinations(stored)
            if observer is not None:
                observer.region_started(compute.name)
            results = self.regions[compute.name](arguments)
            if observer is not None:
                observer.region_finished(compute.name)
            values.update(zip(compute.outputs, results, strict=True))
            del arguments, results
            for name in self._unread[position]:
                del values[name]
            if destinations is not None:
                destinations.arrived(stored, values)
        return [None if name is None else values[name] for name in self.schedule.outputs]

    def sharing(self, memory: TemporaryMemory) -> Executable:
        """See ``SharingProgram``. What one region passes to another is not shared."""
        regions = {name: sharing(region, memory) for name, region in self.regions.items()}
        return replace(link(self.schedule, regions), observer=self.observer)


def link(schedule: Schedule, regions: Mapping[str, Region]) -> Executable:
    """Joins a schedule with its compiled regions.

    Raises:
        InternalError: a region is missing.
    """
    missing = [compute.name for compute in schedule.computes if compute.name not in regions]
    if missing:
        raise InternalError(f"schedule {schedule.name} has no compiled region for {missing}")
    last_reads, unread = _lifetimes(schedule)
    return Executable(
        schedule,
        regions,
        _last_reads=last_reads,
        _unread=unread,
        _stored=[tuple(compute.destinations.values()) for compute in schedule.computes],
        _only=None if schedule.destinations else _only_region(schedule, regions),
    )


def _only_region(schedule: Schedule, regions: Mapping[str, Region]) -> Region | None:
    """What runs a schedule that is one region, which needs nobody to pass values on; ``None`` for another."""
    if len(schedule.computes) != 1:
        return None
    (compute,) = schedule.computes
    region = regions[compute.name]
    if (compute.inputs, compute.outputs) == (schedule.inputs, schedule.outputs):
        return region
    places: dict[str | None, int] = {name: place for place, name in enumerate(compute.outputs)}
    places[None] = len(places)
    if not places.keys() >= {*schedule.outputs}:
        return None
    given = {name: place for place, name in enumerate(schedule.inputs)}
    pick_inputs = picker([given[name] for name in compute.inputs])
    pick_outputs = picker([places[name] for name in schedule.outputs])

    def run(inputs: list[torch.Tensor]) -> Sequence[Any]:
        arguments = [*pick_inputs(inputs)]
        inputs.clear()
        return pick_outputs((*region(arguments), None))

    return run


def _lifetimes(schedule: Schedule) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """By position of the region: the values that it is the last to read, and those of its own that nothing
    reads."""
    last_reads: dict[int, tuple[str, ...]] = {}
    unread: dict[int, tuple[str, ...]] = {}
    needed = {name for name in schedule.outputs if name is not None}
    for position, compute in reversed(list(enumerate(schedule.computes))):
        unread[position] = tuple(name for name in compute.outputs if name not in needed)
        last_reads[position] = tuple(name for name in compute.inputs if name not in needed)
        needed.update(compute.inputs)
    return last_reads, unread
