"""When things run: a graph cut into compute regions.

One process is a schedule of one region. Data parallelism cuts the backward where gradients become ready: what a region
stores in its destinations has arrived when the region has run, of which whoever reduces gradients is notified at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradsplit.compile_core.ir.tensor_spec import contiguous_strides


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
            name. The buffer has the result's shape and dtype.
        strides: of those buffers that are not contiguous, by result name.
        replaced: results that are new values of inputs, which nothing else needs, by result name -> input name. The
            region may store such a result in the input's memory, and then returns the input as the result.
        kept: results that nobody sees but another program. Several of them may share memory, which is free when none is
            needed any more.
    """

    name: str
    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    destinations: Mapping[str, str] = field(default_factory=dict)
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    def strides_of(self, result: str, shape: Sequence[int]) -> tuple[int, ...]:
        """How the destination of a result of this shape lies."""
        return self.strides.get(result) or contiguous_strides(tuple(shape))


@dataclass(frozen=True)
class Schedule:
    """A program in regions.

    Attributes:
        name: ``"forward"``, ``"backward"`` or the like.
        inputs: names of the tensors that the caller passes, in order.
        computes: in execution order.
        outputs: what the caller receives, in order: names of values, or ``None`` where nothing is returned (a gradient
            that is undefined, or that went to a destination).
        stored: for each destination, the position among ``outputs`` at which its value would be returned.
    """

    name: str
    inputs: tuple[str, ...]
    computes: tuple[Compute, ...]
    outputs: tuple[str | None, ...]
    stored: Mapping[str, int] = field(default_factory=dict)

    @property
    def destinations(self) -> tuple[str, ...]:
        """The names of all destinations, in the order in which they are written."""
        return tuple(name for compute in self.computes for name in compute.destinations.values())
