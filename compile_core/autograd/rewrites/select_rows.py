"""Rows of a product that nobody reads are not computed: a slice of the result is taken of the left factor instead.

A language model that has one logit too many for its labels cuts off the last of each sequence,
``logits[:, :-1]``. All between the product and the slice, and in the backward all between the gradient of the slice,
which is zeros there, and the gradients of the factors, is done for the other rows only; zeros are put back into the
gradients that have rows. So the rows of the logits are those of the labels, which ``chunk_rows`` needs.

One difference: zeros times an infinite derivative would be NaN in the rows that are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors, memory_of
from gradsplit.compile_core.autograd.operators.linear_nodes import is_linear, is_zero
from gradsplit.compile_core.autograd.operators.region_marks import mark_of
from gradsplit.compile_core.autograd.rewrites.part_writer import PartWriter
from gradsplit.compile_core.autograd.rewrites.rows import Kind, Rows, SomeRows

aten = torch.ops.aten


@dataclass(frozen=True)
class _Selection:
    """``shape`` is that of the first dims, which are the rows; the slice is along one of these."""

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    step: int

    @property
    def chosen(self) -> tuple[int, ...]:
        """The first dims of what is left."""
        sizes = list(self.shape)
        sizes[self.dim] = len(range(self.start, self.stop, self.step))
        return tuple(sizes)


@dataclass
class _Slices:
    """Where rows are left out of what a product is computed on to.

    Attributes:
        rows: of the product.
        selection: which stay.
        taken: slices of values of the part.
        put: gradients of such slices among zeros.
    """

    rows: Rows
    selection: _Selection | None = None
    taken: list[Node] = field(default_factory=list)
    put: list[Node] = field(default_factory=list)


def select_rows(graph: Graph, product: Node) -> Node | None:
    """Changes the graph, and returns the product of fewer rows; ``None`` if all are read, or by what has no rule."""
    slices = _find_slices(graph, Rows(product))
    if slices is None or slices.selection is None:
        return None
    rows = slices.rows
    nodes = rows.wide_part(graph)
    inside = set(nodes)
    if any(mark_of(node) is not None for node in nodes) or not inside.issuperset(slices.put):
        return None
    zero_elsewhere = _zero_elsewhere(nodes, slices)
    if zero_elsewhere is None:
        return None
    results: list[Node] = []
    for node in nodes:
        outside = {user for user in node.users if user not in inside}
        if node in zero_elsewhere:
            if outside and (rows.is_wide(node) or rows.kinds[node] is Kind.TRANSPOSED):
                return None
            results += [node] if outside else []
        elif not outside <= set(slices.taken):
            return None
    if not all(node.meta["val"].is_contiguous() for node in results):
        return None
    # The caller would see other strides.
    given: Any = graph.output_node().args[0]
    if any(result is not None and memory_of(result) in inside.difference(results) for result in given):
        return None
    read = {
        value
        for node in nodes
        if node not in slices.put
        for value in node.all_input_nodes
        if value not in inside
    }
    if not inside.isdisjoint(ancestors(read)):
        return None
    return _Selecting(graph, slices, nodes, results).run()


def _find_slices(graph: Graph, rows: Rows) -> _Slices | None:
    """The values with rows, up to slices of them; ``None`` if these are not all alike."""
    slices = _Slices(rows)
    for node in graph.nodes:
        if node is rows.product:
            continue
        found = _slice_of_rows(node, rows)
        if found is not None:
            if slices.selection not in (None, found):
                return None
            slices.selection = found
            slices.taken.append(node)
        elif slices.selection is not None and _puts(node, slices.selection):
            rows.kinds[node], rows.lead[node] = Kind.GIVEN, len(slices.selection.shape)
            slices.put.append(node)
        else:
            rows.add(node)
    return slices


def _slice_of_rows(node: Node, rows: Rows) -> _Selection | None:
    if node.target is not aten.slice.Tensor or node.kwargs or node.args[0] in rows.apart:
        return None
    given: Any = node.args
    defaults: Any = (0, 0, None, None, 1)
    value, dim, start, stop, step = (*given, *defaults[len(given) :])
    lead = rows.lead.get(value, 0)
    shape = tuple(value.meta["val"].shape)
    if not shape or dim % len(shape) >= lead:
        return None
    return _selection(shape[:lead], dim % len(shape), start, stop, step)


def _selection(shape: tuple[int, ...], dim: int, start: Any, stop: Any, step: Any) -> _Selection | None:
    if not all(isinstance(number, (int, type(None))) for number in (start, stop, step)):
        return None
    return _Selection(shape, dim, *slice(start, stop, step).indices(shape[dim]))


def _puts(node: Node, selection: _Selection) -> bool:
    """Whether the node is zeros but for the selected rows."""
    if node.target is not aten.slice_scatter.default or node.kwargs or not is_zero(node.args[0]):
        return False
    given: Any = node.args
    defaults: Any = (0, 0, 0, None, None, 1)
    _, _, dim, start, stop, step = (*given, *defaults[len(given) :])
    shape, lead = tuple(node.meta["val"].shape), len(selection.shape)
    if shape[:lead] != selection.shape or dim % len(shape) >= lead:
        return False
    return selection == _selection(shape[:lead], dim % len(shape), start, stop, step)


def _zero_elsewhere(nodes: list[Node], slices: _Slices) -> set[Node] | None:
    """The values of the part whose other rows are zeros; ``None`` if one that is computed from such may have others."""
    found = set(slices.put)
    for node in nodes:
        if node not in found and not found.isdisjoint(node.all_input_nodes):
            if not is_linear(node, found):
                return None
            found.add(node)
    return found


class _Selecting(PartWriter):
    """A graph while some rows of a part of it are left out."""

    def __init__(self, graph: Graph, slices: _Slices, nodes: list[Node], results: list[Node]) -> None:
        super().__init__(graph, slices.rows)
        assert slices.selection is not None
        self.selection = slices.selection
        self.slices = slices
        self.nodes = nodes
        self.results = results

    def run(self) -> Node:
        count = prod(self.selection.chosen)
        some = SomeRows(self.rows, count, self.call, self.outer, self.flat, self._pick)
        with self.mode, self.graph.inserting_before(self.product):
            *summand, left, right = self.product.args
            assert isinstance(left, Node)
            product = self.call(
                self.product, self.product.target, *summand, self._pick(self.product, left, 0), right
            )
            some.values[self.product] = product
            whole: dict[Node, Node] = {}
            for node in self.nodes[1:]:
                self._compute(node, some, whole)
            whole.update(
                {node: self._whole(node, some.values[node]) for node in self.results if node not in whole}
            )
            for node in self.slices.taken:
                whole[node] = self.reshaped(
                    node, some.values[node.all_input_nodes[0]], node.meta["val"].shape
                )
        self.finish([*self.nodes, *self.slices.taken], whole)
        return product

    def _compute(self, node: Node, some: SomeRows, whole: dict[Node, Node]) -> None:
        kind = self.rows.kinds[node]
        if kind is Kind.GIVEN:
            put: Any = node.args[1]
            rest = node.meta["val"].shape[len(self.selection.shape) :]
            some.values[node] = self.reshaped(node, put, [some.count, *rest])
        elif kind is Kind.SUMMED_PRODUCT:
            whole[node] = self.call(node, node.target, *some.factors(node))
        else:
            some.compute(node)
            if kind is Kind.SUMMED_ROWS:
                value = node.meta["val"]
                total = some.values[node]
                if total.meta["val"].dtype != value.dtype:
                    total = self.call(node, aten._to_copy.default, total, dtype=value.dtype)
                whole[node] = self.reshaped(node, total, value.shape)

    def _pick(self, like: Node, value: Node, dim: int) -> Node:
        """The selected rows of a value that has all of them in one dim."""
        before, after = value.meta["val"].shape[:dim], value.meta["val"].shape[dim + 1 :]
        chosen = self.selection
        apart = self.reshaped(like, value, [*before, *chosen.shape, *after])
        cut = self.call(
            like, aten.slice.Tensor, apart, dim + chosen.dim, chosen.start, chosen.stop, chosen.step
        )
        return self.reshaped(like, cut, [*before, prod(chosen.chosen), *after])

    def _whole(self, node: Node, value: Node) -> Node:
        """A result with zeros for the rows that were left out."""
        chosen, full = self.selection, node.meta["val"]
        rest = value.meta["val"].shape[1:]
        apart = self.reshaped(node, value, [*chosen.chosen, *rest])
        zeros = self.call(
            node, aten.full.default, [*chosen.shape, *rest], 0, dtype=full.dtype, device=full.device
        )
        among = self.call(
            node, aten.slice_scatter.default, zeros, apart, chosen.dim, chosen.start, chosen.stop, chosen.step
        )
        return self.reshaped(node, among, full.shape)
