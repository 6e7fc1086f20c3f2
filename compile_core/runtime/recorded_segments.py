"""Recordings of a backward that stores gradients for a communicator: one for each region, and the news between them.

The collectives are not part of a recording. Whoever owns them is told behind the replay of each region what has been
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
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradsplit.compile_core.ir.communicator import Communicator
from gradsplit.compile_core.runtime.executable import Executable, Region
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram, Program, Recorder


@dataclass(frozen=True)
class StoringProgram:
    """An executable that is called with its destinations behind its inputs, so that it is known where they lie. Its
    communicator has been told that it begins."""

    executable: Executable

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        del inputs[len(self.executable.schedule.inputs) :]
        return self.executable.run(inputs)


class SegmentRecorder:
    """Records a ``StoringProgram`` region by region, each with another recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def reason_against(self) -> str:
        return self._recorder.reason_against()

    def follow(self, stream: Any) -> Any:
        return self._recorder.follow(stream)

    def in_parts(self) -> Recorder:
        return self

    def record(self, program: Program, inputs: list[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        assert isinstance(program, StoringProgram)
        executable = program.executable
        assert executable.communicator is not None
        steps: list[Callable[[], None]] = []
        parts = self._recorder.in_parts()

        def recording(name: str, region: Region) -> Region:
            def record(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
                replay, results = parts.record(region, arguments)
                steps.append(functools.partial(_replay, executable, name, replay))
                return results

            return record

        recorded = replace(
            executable,
            regions={name: recording(name, region) for name, region in executable.regions.items()},
            communicator=_NotedNews(executable.communicator, steps),
            observer=None,
        )
        results = StoringProgram(recorded)(inputs)

        def replay() -> None:
            for step in steps:
                step()

        return replay, results


class _NotedNews:
    """The communicator of a run that computes nothing yet: what it would be told is told in each replay."""

    def __init__(self, communicator: Communicator, steps: list[Callable[[], None]]) -> None:
        self.anchor = communicator.anchor
        self.expect = communicator.expect
        self.wanted_values = communicator.wanted_values
        self.take_values = communicator.take_values
        self.leave_out = communicator.leave_out
        self.begin = communicator.begin
        self.destinations = communicator.destinations
        self.usual_places = communicator.usual_places
        self._arrived = communicator.arrived
        self._steps = steps

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        # The values are not kept: they are memory that the next segments use again.
        self._steps.append(functools.partial(self._arrived, names, None))


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
        executable: the backward.
        graphed: replays it as a ``StoringProgram``, whose destinations it changes.
    """

    def __init__(self, executable: Executable, graphed: GraphedProgram) -> None:
        assert executable.communicator is not None
        self._executable = executable
        self._communicator = executable.communicator
        self._graphed = graphed
        self._names = executable.schedule.destinations

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        self._communicator.begin()
        places = self._communicator.usual_places(self._names)
        if places is not None:
            return self._graphed([*inputs, *places])
        values = self._graphed.restored(inputs)
        inputs.clear()
        return self._executable.run(values)

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """See ``GraphedProgram``."""
        return self._graphed.restored(saved)
