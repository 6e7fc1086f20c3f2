"""When things run: a graph cut into compute regions and the collectives between them.

One process is a schedule of one ``Compute``. Data parallelism cuts the backward where gradient buckets become ready,
starts each bucket's collective behind the region that completes it, and waits for all of them last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Compute:
    """A region to compile as one program.

    Attributes:
        name: unique in its schedule, e.g. ``"backward_2"``.
        module: the region as a functional ATen graph: one placeholder per entry of ``inputs``, in order; its output
            node is a flat tuple with one entry per entry of ``outputs``.
        inputs: names of the values it reads: inputs of the schedule or outputs of earlier regions.
        outputs: names under which its results are known from then on, unique in the schedule.
        destinations: which results must be stored into a persistent buffer of the caller, by result name -> destination
            name. The buffer has the result's shape and dtype and is contiguous.
        replaced: results that are new values of inputs, which nothing else needs, by result name -> input name. The
            region may store such a result in the input's memory, and then returns the input as the result.
    """

    name: str
    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    destinations: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StartCollective:
    """Starts reducing a bucket all of whose destinations are written."""

    bucket: int


@dataclass(frozen=True)
class WaitCollective:
    """Makes what follows see the reduced bucket."""

    bucket: int


ScheduleStep = Compute | StartCollective | WaitCollective


@dataclass(frozen=True)
class Schedule:
    """A program in steps.

    Attributes:
        name: ``"forward"``, ``"backward"`` or the like.
        inputs: names of the tensors that the caller passes, in order.
        steps: in execution order.
        outputs: what the caller receives, in order: names of values, or ``None`` where nothing is returned (a gradient
            that is undefined, or that went to a destination).
    """

    name: str
    inputs: tuple[str, ...]
    steps: tuple[ScheduleStep, ...]
    outputs: tuple[str | None, ...]

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(step for step in self.steps if isinstance(step, Compute))
