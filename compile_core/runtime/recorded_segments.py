"""Recordings of a backward that stores gradients for a communicator: one for each region, and the news between them.

The collectives are not part of a recording. Their owner is called after the replay of each region with what has been
written, as in a plain run, and starts them by rules of its own. NCCL could be recorded with the kernels, but asks then
that all ranks record together and replay alike, always. A rank whose gradients add up to others', whose result is still
held, or whose parameter moved, must run plainly while the others replay; the process group's watchdog sees recorded
collectives no more than it sees kernels, so that a rank that died would be waited for without an end; and memory of the
communicator would be in use as long as a recording lives. What remains to be launched one by one is a call a region and
a call a bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradsplit.compile_core.ir.communicator import Destinations, Program
from gradsplit.compile_core.runtime.executable import Executable, Region
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram, Recorder


class StoringProgram:
    """A backward called with its inputs and then its destinations, so that their addresses are known.

    Attributes:
        destinations: of the run that is under way.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.destinations: Destinations | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        del inputs[len(self.executable.schedule.inputs) :]
        return self.executable(inputs, self.destinations)

    def arrived(self, names: Sequence[str]) -> None:
        """A region was replayed. Its values are not known: they are memory that the next segments use again."""
        assert self.destinations is not None
        self.destinations.arrived(names, None)


class SegmentRecorder:
    """Records a ``StoringProgram`` region by region, each with another recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def reason_against(self) -> str:
        return self._recorder.reason_against()

    def follow(self, stream: Any) -> Any:
        return self._recorder.follow(stream)

    def in_parts(self, within: Any = None) -> Recorder:
        return self

    @property
    def lends(self) -> bool:
        return self._recorder.lends

    def lent(self, tensors: list[torch.Tensor], replay: Any) -> list[torch.Tensor]:
        return self._recorder.lent(tensors, replay)

    def rehearse(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        return program(inputs)

    def record(
        self, program: Program, inputs: list[Any], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        assert isinstance(program, StoringProgram) and program.destinations is not None
        executable = program.executable
        steps: list[Callable[[], None]] = []
        parts = self._recorder.in_parts(within)

        def recording(name: str, region: Region) -> Region:
            def record(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
                replay, results = parts.record(region, arguments)
                steps.append(functools.partial(_replay, executable, name, replay))
                return results

            return record

        recorded = replace(
            executable,
            regions={name: recording(name, region) for name, region in executable.regions.items()},
            observer=None,
        )
        del inputs[len(executable.schedule.inputs) :]
        results = recorded(inputs, _NotedArrivals(program, program.destinations, steps))

        def replay() -> None:
            for step in steps:
                step()

        return replay, results


class _NotedArrivals:
    """The destinations of a run that computes nothing yet: what has arrived is passed on in each replay."""

    def __init__(
        self, program: StoringProgram, destinations: Destinations, steps: list[Callable[[], None]]
    ) -> None:
        self.destinations, self.usual_places = destinations.destinations, destinations.usual_places
        self._program, self._steps = program, steps

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        self._steps.append(functools.partial(self._program.arrived, names))


def _replay(executable: Executable, name: str, replay: Callable[[], None]) -> None:
    observer = executable.observer
    if observer is None:
        replay()
        return
    observer.region_started(name)
    replay()
    observer.region_finished(name)


class GraphedBackward:
    """A backward with destinations that replays recordings where its gradients go to their places at once.

    Args:
        program: the backward.
        graphed: replays it; it changes the destinations.
    """

    def __init__(self, program: StoringProgram, graphed: GraphedProgram) -> None:
        self._program = program
        self._graphed = graphed

    def __call__(self, inputs: list[Any], destinations: Destinations) -> Sequence[Any]:
        executable = self._program.executable
        places = destinations.usual_places(executable.schedule.destinations)
        if places is None:
            values = self._graphed.restored(inputs)
            inputs.clear()
            return executable(values, destinations)
        self._program.destinations = destinations
        try:
            given = [*inputs, *places]
            inputs.clear()
            return self._graphed(given)
        finally:
            self._program.destinations = None

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """See ``GraphedProgram``."""
        return self._graphed.restored(saved)
