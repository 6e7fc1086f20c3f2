"""Stage between trace and partition: a loss over a vocabulary is computed for some rows of the logits at a time.

The logits of a language model, ``[tokens, vocabulary]``, and their gradient are its largest values by far, and all that
is wanted of them is small: a loss a token, and the products of the gradient with the head's weight and with its inputs.
So the product, all that is computed row by row from it (``rows.py``: casts, caps, softmax, smoothing, whatever there
is), and these products are done for a chunk of rows after the other; results a row are put together, sums over rows are
added up. What a chunk holds is gone before the next begins (``ir.row_chunks``).

The gradient would wait for the backward, and the logits with it, or they would be computed a second time. But it is
linear in the one number that arrives there, the loss's gradient: it is computed at once, in the forward, as if that
were a one, and multiplied in the backward. (Liger's and Apple's kernels for this loss do so by hand.) Where a one does
arrive, the values are those of the plain order but for the sums over chunks.

What is left alone: products that something outside needs whole; gradients that depend on several numbers that arrive,
on one for each row, or not linearly, as that of ``exp(loss)`` does, which needs all rows first; in float16, whose small
numbers need the factor that a gradient scaler sends, before they are rounded; checkpoints; open sizes; and what is
small. The idea is that of Liger (Hsu et al. 2024) and of Cut Cross-Entropy (Wijmans et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.graph_nodes import ancestors
from gradsplit.compile_core.autograd.operators.kinds import is_fusible
from gradsplit.compile_core.autograd.operators.linear_nodes import is_linear
from gradsplit.compile_core.autograd.operators.region_marks import mark_of
from gradsplit.compile_core.autograd.rewrites.part_writer import PartWriter
from gradsplit.compile_core.autograd.rewrites.rows import (
    REDUCTIONS,
    WIDTH_RATIO,
    Kind,
    Rows,
    SomeRows,
    reduced_dims,
)
from gradsplit.compile_core.autograd.rewrites.select_rows import select_rows
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.row_chunks import ADD_PRODUCT, AFTER, WIDE_PRODUCT
from gradsplit.compile_core.torch_facts.dispatcher import is_needed_unread

aten = torch.ops.aten

# Kernels and products of fewer rows, or of other numbers of them, leave much of a GPU idle.
_ROW_MULTIPLE = 128


def chunk_rows(joint: JointGraph, chunk_bytes: int) -> JointGraph:
    """The joint graph with such products done by chunks; changes its module and returns it.

    Args:
        joint: the graph.
        chunk_bytes: about how many bytes of a product there may be at a time; a product of at most twice as many is
            left alone. 0 leaves all alone.
    """
    graph = joint.module.graph
    left = list(graph.nodes)
    is_changed = False
    while left:
        node = left.pop(0)
        if not chunk_bytes or not _is_large(node, 2 * chunk_bytes):
            continue
        product = select_rows(graph, node)
        part = None
        if product is None or _is_large(product, 2 * chunk_bytes):
            part = _find_part(graph, product or node, joint.tangents)
        if part is not None:
            _Chunking(graph, part, _chunk_rows(part.rows.product, chunk_bytes)).run()
        if product is not None or part is not None:
            is_changed = True
            here = set(graph.nodes)
            left = [node for node in left if node in here]
    if is_changed:
        graph.eliminate_dead_code(is_needed_unread)
        graph.lint()
        joint.module.recompile()
    return joint


def _is_large(node: Node, least_bytes: int) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or mark_of(node) is not None:
        return False
    result = node.meta["val"]
    left: Any = node.args[-2]
    if not all(isinstance(size, int) for size in (*result.shape, *left.meta["val"].shape)):
        return False
    rows, width = result.shape
    inner = left.meta["val"].shape[1]
    # The gradient of the weight, where there is one, is added up in float32 and is in memory beside a chunk.
    saves = rows * result.dtype.itemsize > torch.float32.itemsize * inner and width >= WIDTH_RATIO * inner
    return saves and rows * width * result.dtype.itemsize > least_bytes and _is_reduced(node)


def _is_reduced(product: Node) -> bool:
    """Whether rows of something wide that is computed from a product are reduced: only then is there a loss to find."""
    width = product.meta["val"].shape[1]
    seen = {product}
    frontier = [product]
    while frontier:
        for user in frontier.pop().users:
            value = user.meta.get("val")
            if user.target in REDUCTIONS and 0 not in reduced_dims(user):
                return True
            is_wide = (
                isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] * WIDTH_RATIO > width
            )
            if user not in seen and is_wide and user.target is not aten.mm.default:
                seen.add(user)
                frontier.append(user)
    return False


def _chunk_rows(product: Node, chunk_bytes: int) -> int:
    """How many rows a chunk has, the last one but for the rest."""
    rows, width = product.meta["val"].shape
    most = max(chunk_bytes // (width * product.meta["val"].dtype.itemsize), 1)
    count = -(-rows // most)
    for more in range(count, 2 * count):
        # All of one size are one kernel.
        if rows % more == 0 and rows // more % _ROW_MULTIPLE == 0:
            return rows // more
    size = -(-rows // count)
    return size if size < _ROW_MULTIPLE else -(-size // _ROW_MULTIPLE) * _ROW_MULTIPLE


@dataclass
class _Part:
    """What is to be done by chunks.

    Attributes:
        rows: how its nodes are computed.
        nodes: they, in order, the product first.
        arriving: the number that gradients of the part are multiples of, if there are any.
        scaled: what is computed from it outside of the part, in order, and read inside.
        multiples: nodes of the part that are multiples of it.
    """

    rows: Rows
    nodes: list[Node]
    arriving: Node | None = None
    scaled: list[Node] = field(default_factory=list)
    multiples: set[Node] = field(default_factory=set)

    def results(self) -> list[Node]:
        """What is read outside."""
        inside = set(self.nodes)
        return [node for node in self.nodes if not inside.issuperset(node.users)]


def _find_part(graph: Graph, product: Node, tangents: Sequence[str]) -> _Part | None:
    """What hangs on a product and can be done by chunks, with nothing wide left; ``None`` if that is not all."""
    rows = Rows(product)
    for node in graph.nodes:
        if node is not product:
            rows.add(node)
    nodes = rows.wide_part(graph)
    inside = set(nodes)
    # Without a reduction it is a layer that widens, whose result is kept.
    if not any(rows.kinds[node] is Kind.REDUCED for node in nodes):
        return None
    if any(mark_of(node) is not None for node in nodes):
        return None
    part = _Part(rows, nodes)
    results = part.results()
    if any(rows.is_wide(node) or rows.kinds[node] is Kind.TRANSPOSED for node in results):
        return None
    # What is put together or added up has no gaps.
    if not all(node.meta["val"].is_contiguous() for node in results):
        return None
    outside = {value for node in nodes for value in node.all_input_nodes if value not in inside}
    before = ancestors(outside)
    if not inside.isdisjoint(before):
        return None
    return _with_arriving(graph, part, before, tangents)


def _with_arriving(graph: Graph, part: _Part, before: set[Node], tangents: Sequence[str]) -> _Part | None:
    """The part, with what its gradients are multiples of; ``None`` if that is not one number."""
    arriving = {node for node in before if node.op == "placeholder" and node.name in tangents}
    if not arriving:
        return part
    number = arriving.pop()
    value = number.meta["val"]
    if arriving or not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    if any(node.name in tangents for node in ancestors([part.rows.product])):
        return None  # a product of the backward
    varying = {number}
    inside = set(part.nodes)
    for node in graph.nodes:
        if (node in before or node in inside) and not varying.isdisjoint(node.all_input_nodes):
            if not is_linear(node, varying) or node.meta["val"].dtype is torch.float16:
                return None
            if node not in inside and not _is_cheap(node, part.rows):
                return None
            varying.add(node)
    in_order = [node for node in graph.nodes if node in varying and node is not number]
    part.arriving = number
    part.multiples.update(node for node in in_order if node in inside)
    part.scaled.extend(node for node in in_order if node not in inside)
    return part


def _is_cheap(node: Node, rows: Rows) -> bool:
    """Whether the forward may compute it for itself: it is not the backward of what follows the loss."""
    few = 2 * node.meta["val"].numel() <= rows.count * rows.width
    return few and is_fusible(node) and mark_of(node) is None


class _Chunking(PartWriter):
    """A graph while one part of it is done by chunks of ``size`` rows."""

    def __init__(self, graph: Graph, part: _Part, size: int) -> None:
        super().__init__(graph, part.rows)
        self.part = part
        self.size = size

    def run(self) -> None:
        """Changes the graph."""
        results = self.part.results()
        whole: dict[Node, Node] = {}
        with self.mode, self.graph.inserting_before(self.product):
            self._compute_for_one()
            chunks, sums = self._chunks(results)
            for node in results:
                if node in sums and _is_only_widened(node, sums[node]):
                    total = self.reshaped(node, sums[node], node.meta["val"].shape)
                    self._widen(node, self._multiplied(node, total), whole)
                else:
                    whole[node] = self._multiplied(node, self._whole(node, chunks, sums))
        self.finish([*self.part.nodes, *whole], whole)

    def _compute_for_one(self) -> None:
        """What gradients of the part are computed from, for a one in the place of what arrives."""
        number = self.part.arriving
        if number is None:
            return
        value = number.meta["val"]
        self.replaced[number] = self.call(
            self.product, aten.full.default, list(value.shape), 1.0, dtype=value.dtype, device=value.device
        )
        for node in self.part.scaled:
            args, kwargs = map_arg((node.args, node.kwargs), lambda read: self.replaced.get(read, read))
            self.replaced[node] = self.call(node, node.target, *args, **kwargs)

    def _chunks(self, results: Sequence[Node]) -> tuple[list[SomeRows], dict[Node, Node]]:
        """The part for each chunk, and its sums over them."""
        chunks: list[SomeRows] = []
        sums: dict[Node, Node] = {}
        summed = [node for node in self.part.nodes if self.rows.kinds[node] is Kind.SUMMED_ROWS]
        for start in range(0, self.rows.count, self.size):
            chunk = self._chunk(start, min(start + self.size, self.rows.count))
            chunk.values[self.product] = self._product(chunk, chunks, sums, results)
            for node in self.part.nodes[1:]:
                if self.rows.kinds[node] is Kind.SUMMED_PRODUCT:
                    sums[node] = self._added_product(node, sums.get(node), *chunk.factors(node))
                else:
                    chunk.compute(node)
            if start + self.size >= self.rows.count:
                self._complete_gradients(chunk, sums, results)
            for node in summed:
                value = chunk.values[node]
                sums[node] = self.call(node, aten.add.Tensor, sums[node], value) if chunks else value
            chunks.append(chunk)
        return chunks, sums

    def _complete_gradients(self, last: SomeRows, sums: dict[Node, Node], results: Sequence[Node]) -> None:
        """Puts what the forward wants of the last chunk after all gradients, so that the forward computes these."""
        values = {**sums, **last.values}
        gradients = [values[node] for node in results if node in self.part.multiples]
        for node in results:
            # They are put together or added up yet: nothing that shares memory leaves the part.
            if gradients and node not in self.part.multiples and node in last.values:
                last.values[node] = self.call(node, AFTER, last.values[node], gradients)

    def _chunk(self, start: int, stop: int) -> SomeRows:
        def pick(like: Node, value: Node, dim: int) -> Node:
            return self.call(like, aten.slice.Tensor, value, dim, start, stop)

        return SomeRows(self.rows, stop - start, self.call, self.outer, self.flat, pick)

    def _product(
        self, chunk: SomeRows, before: Sequence[SomeRows], sums: dict[Node, Node], results: Iterable[Node]
    ) -> Node:
        """The product of the chunk's rows, after all of the chunk before."""
        *summand, left, right = self.product.args
        assert isinstance(left, Node)
        taken = chunk.pick(self.product, left, 0)
        if before:
            values = {**before[-1].values, **sums}
            taken = self.call(self.product, AFTER, taken, [values[node] for node in results])
        return self.call(self.product, self.product.target, *summand, taken, right)

    def _added_product(self, node: Node, total: Node | None, left: Node, right: Node) -> Node:
        if total is None:
            return self.call(node, WIDE_PRODUCT, left, right)
        return self.call(node, ADD_PRODUCT, total, left, right)

    def _whole(self, node: Node, chunks: Sequence[SomeRows], sums: dict[Node, Node]) -> Node:
        """A result of the part."""
        value = node.meta["val"]
        if node not in sums:
            whole = self.call(node, aten.cat.default, [chunk.values[node] for chunk in chunks])
        elif sums[node].meta["val"].dtype == value.dtype:
            whole = sums[node]
        else:
            whole = self.call(node, aten._to_copy.default, sums[node], dtype=value.dtype)
        return self.reshaped(node, whole, value.shape)

    def _widen(self, node: Node, value: Node, whole: dict[Node, Node]) -> None:
        """Gives those that read a sum in the type that it was added up in what was never rounded."""
        for user in list(node.users):
            if user.target is aten._to_copy.default:
                whole[user] = value
            else:
                whole[user] = view = self.call(user, user.target, value, *user.args[1:], **user.kwargs)
                self._widen(user, view, whole)

    def _multiplied(self, node: Node, value: Node) -> Node:
        if node not in self.part.multiples:
            return value
        number: Any = self.part.arriving
        if number.meta["val"].dim():
            number = self.call(number, aten.view.default, number, [])
        return self.call(node, aten.mul.Tensor, value, number)


def _is_only_widened(node: Node, total: Node) -> bool:
    """Whether a result that was added up in a wider type is read in that type, if also through views."""
    dtype = total.meta["val"].dtype
    if node.meta["val"].dtype == dtype:
        return False
    for user in node.users:
        if user.target is aten._to_copy.default:
            plain = user.meta["val"].dtype == dtype and user.meta["val"].device == total.meta["val"].device
            if not plain or user.kwargs.get("memory_format") is not None:
                return False
        elif user.target not in (aten.slice.Tensor, aten.view.default) or not _is_only_widened(user, total):
            return False
    return True
