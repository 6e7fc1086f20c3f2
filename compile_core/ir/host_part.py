"""A captured graph for a GPU in two: what it computes on the CPU, and the rest."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule


@dataclass(frozen=True)
class HostPart:
    """A graph in two.

    Attributes:
        host: computes on the CPU alone.
        device: the rest.
        host_inputs: which of the whole graph's inputs ``host`` takes.
        device_inputs: which of them ``device`` takes first.
        handed: after them ``device`` takes this many of the first results of ``host``.
        results: for each result of the whole graph whether ``host`` returns it, and its position there.
        may_draw: whether ``host`` does more than move numbers, so that it may draw random ones.
    """

    host: GraphModule
    device: GraphModule
    host_inputs: tuple[int, ...]
    device_inputs: tuple[int, ...]
    handed: int
    results: tuple[tuple[bool, int], ...]
    may_draw: bool
