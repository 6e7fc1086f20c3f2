"""Concatenation: one nest per part, each storing into its window of one buffer.

Reductions over dims that were not concatenated go to the parts instead: their nests then fuse with those that
store the parts. (Attention's gradients are concatenated, stored and summed over rows in one nest this way.)

Where a concatenation begins with all parts of another, as each layer of a dense block adds one, both are one buffer: of
the longest the others are views, and a part is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import ProgramBuilder
from gradsplit.compile_core.lowering.graph_to_loops.lower_plan import GraphPlan, numel_of
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import LazyTensor
from gradsplit.compile_core.lowering.graph_to_loops.reduction_rules import Reduction, lower_reduction
from gradsplit.compile_core.lowering.graph_to_loops.view_rules import reshaped, restride

aten = torch.ops.aten


@dataclass
class _Growing:
    """The buffer of concatenations that begin alike, and how many of their parts have been stored."""

    place: View
    stored: int = 0


class Concatenations:
    """Those of one graph."""

    def __init__(self, builder: ProgramBuilder, graph: torch.fx.Graph, plan: GraphPlan) -> None:
        self.builder = builder
        self.plan = plan
        self.longest = _longest_with_the_same_beginning(graph, plan)
        self.growing: dict[torch.fx.Node, _Growing] = {}

    def lower(self, node: torch.fx.Node, args: Any) -> LazyTensor:
        """Stores the parts that are not stored yet."""
        fake, dim = node.meta["val"], _dim(node)
        longest = self.longest.get(node, node)
        growing = self.growing.get(longest)
        if growing is None:
            place = self.plan.places.get(longest) or self.builder.new_like(longest.name, longest.meta["val"])
            growing = self.growing[longest] = _Growing(place)
        start = 0
        for number, tensor in enumerate(args[0]):
            if tensor.shape == (0,) and fake.dim() != 1:
                continue
            length = tensor.shape[dim]
            if number >= growing.stored:
                self.builder.store_into(_window(growing.place, dim, start, length), tensor)
            start += length
        growing.stored = max(growing.stored, len(args[0]))
        return self.builder.in_memory(_window(growing.place, dim, 0, start), tuple(fake.stride()), node.name)


def _longest_with_the_same_beginning(
    graph: torch.fx.Graph, plan: GraphPlan
) -> dict[torch.fx.Node, torch.fx.Node]:
    """For concatenations that only loops read, one that begins with all of their parts.

    Torch's kernels and the caller want memory without gaps.
    """
    by_beginning: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: Any = node.args[0]
        if (
            node in plan.alive
            and node not in plan.places
            and all(part.meta["val"].dim() > 1 for part in parts)
        ):
            by_beginning.setdefault((parts[0], _dim(node), node.meta["val"].dtype), []).append(node)
    longest: dict[torch.fx.Node, torch.fx.Node] = {}
    for nodes in by_beginning.values():
        nodes.sort(key=lambda node: -len(_parts(node)))
        for number, node in enumerate(nodes):
            if node not in plan.in_memory:
                parts = _parts(node)
                longest[node] = next(n for n in nodes[: number + 1] if _parts(n)[: len(parts)] == parts)
    return longest


def _parts(node: torch.fx.Node) -> list[torch.fx.Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _dim(node: torch.fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return dim % max(node.meta["val"].dim(), 1)


def _window(place: View, dim: int, start: int, length: int) -> View:
    window = restride(place, lambda tensor: tensor.narrow(dim, start, length))
    assert window is not None
    return window


def parts_along_last_dim(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> list[LazyTensor] | None:
    """What was concatenated along the last dim to get a node (or a view of leading dims), if all lies in
    memory.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    if node.target is aten.cat.default:
        tensors = [values[tensor] for tensor in node.all_input_nodes]
        dim = node.args[1] if len(node.args) > 1 else 0
        on_last = dim in (-1, value.dim() - 1) and all(len(tensor.shape) == value.dim() for tensor in tensors)
        whole = on_last and sum(tensor.shape[-1] for tensor in tensors) == value.shape[-1]
        alike = all(tensor.dtype == value.dtype and tensor.located() is not None for tensor in tensors)
        return tensors if whole and alike else None
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        base = node.all_input_nodes[0]
        parts = parts_along_last_dim(base, values) if numel_of(base) else None
        if parts is None or base.meta["val"].shape[-1] != value.shape[-1]:
            return None
        return [reshaped(part, (*value.shape[:-1], part.shape[-1]), node.name) for part in parts]
    return None


def reduce_parts(
    builder: ProgramBuilder,
    node: torch.fx.Node,
    parts: Sequence[LazyTensor],
    reduction: Reduction,
    place: View | None,
) -> LazyTensor:
    """Reduces what was concatenated instead of the concatenation, whose nests then fuse with the
    reductions.
    """
    fake = node.meta["val"]
    spec = TensorSpec.contiguous(tuple(fake.shape), fake.dtype, fake.device)
    place = place or builder.new_buffer(node.name, spec)
    start = 0
    for part in parts:
        length = part.shape[-1]
        window = _window(place, -1, start, length)
        like = torch.empty(window.shape, dtype=fake.dtype, device="meta")
        lower_reduction(builder, part, reduction, like, node.name, window)
        start += length
    return builder.in_memory(place, tuple(fake.stride()), node.name)
