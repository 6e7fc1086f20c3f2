"""Which part of a joint graph is computed row by row from a matrix product, and how it is computed for some rows only.

The rows are those of the product's result ``[N, V]``. A value of the part has them as its first dims, which may be
several, as batch and time are: ``lead`` of them, of N elements together. An operator belongs to the part where each row
of its result depends on the same row of its arguments, on values that have no rows and on values from outside that have
rows, too. Sums over all rows, among them products with a transposed value, are where the part ends: they are the sum of
what is computed for each chunk of rows. What is as wide and is not computed from the product, as what the labels say of
each of its elements, belongs to the part where nothing else reads it.

Limits: static sizes; the operators listed here. What is none of these is outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.ir.row_chunks import sum_dtype
from gradsplit.compile_core.torch_facts.dispatcher import is_random

aten = torch.ops.aten


class Kind(Enum):
    """How a node is computed for some rows; given are values with rows of which whoever looks for the part knows."""

    GIVEN = auto()
    PRODUCT = auto()
    RESHAPED = auto()
    EXPANDED = auto()
    PERMUTED = auto()
    ELEMENTWISE = auto()
    ALONG_A_DIM = auto()
    REDUCED = auto()
    TRANSPOSED = auto()
    SUMMED_PRODUCT = auto()
    SUMMED_ROWS = auto()

    @property
    def is_sum(self) -> bool:
        return self in (Kind.SUMMED_PRODUCT, Kind.SUMMED_ROWS)


_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
_ELEMENTWISE = {
    aten.where.self, aten._to_copy.default, aten.clone.default, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default,
}  # fmt: skip
REDUCTIONS = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.any.dims,
    aten.all.dim, aten.all.dims, aten.prod.dim_int, aten.argmax.default, aten.argmin.default,
}  # fmt: skip
# Look-ups along a dim, by an index of the same rows: ``(tensor, dim, index, ...)``.
_LOOK_UPS = {
    aten.gather.default, aten.scatter_add.default, aten.scatter.src, aten.scatter.value,
}  # fmt: skip
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}

# Of what is wide beside the width of the product.
WIDTH_RATIO = 2

# Makes a node of a chunk: an operator and its arguments.
Call = Callable[..., Node]


@dataclass
class Rows:
    """Values with rows, as far as they are known.

    Attributes:
        product: the matrix product whose result's rows these are.
        kinds: how each node of the part is computed.
        lead: for values with rows, how many of their first dims number them.
        apart: those nodes that are not computed from the product.
    """

    product: Node
    kinds: dict[Node, Kind] = field(default_factory=dict)
    lead: dict[Node, int] = field(default_factory=dict)
    apart: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kinds[self.product], self.lead[self.product] = Kind.PRODUCT, 1

    @property
    def count(self) -> int:
        """How many there are."""
        return self.product.meta["val"].shape[0]

    @property
    def width(self) -> int:
        """Elements of a row of the product's."""
        return self.product.meta["val"].shape[1]

    def row_elements(self, node: Node) -> int:
        """How many elements a value has for each row."""
        return prod(node.meta["val"].shape) // self.count

    def is_wide(self, node: Node) -> bool:
        """Whether a value with rows has about as many elements as the product."""
        return (
            node in self.kinds
            and not self.kinds[node].is_sum
            and WIDTH_RATIO * self.row_elements(node) > self.width
        )

    # -- which nodes

    def wide_part(self, graph: Graph) -> list[Node]:
        """The product, the nodes that make or read wide values, and those on the way from one such to another."""
        chosen: set[Node] = set()
        for node in reversed(graph.nodes):
            if node not in self.kinds:
                continue
            is_wide = node not in self.apart and any(map(self.is_wide, (node, *node.all_input_nodes)))
            if is_wide or not chosen.isdisjoint(node.users):
                chosen.add(node)
        while True:
            # What is apart is in the part with all that it is computed from and all that reads it, or outside.
            gone = {
                node
                for node in chosen & self.apart
                if not chosen.issuperset(node.users)
                or any(value in self.kinds and value not in chosen for value in node.all_input_nodes)
            }
            if not gone:
                break
            chosen -= gone
        return [self.product, *(node for node in graph.nodes if node in chosen and node is not self.product)]

    def add(self, node: Node) -> None:
        """Takes a node into the part, if it is computed from it row by row."""
        result = node.meta.get("val")
        if node.op != "call_function" or not isinstance(result, torch.Tensor) or is_random(node):
            return
        if any(not isinstance(size, int) for size in result.shape):
            return
        if any(self._is_end(value) for value in node.all_input_nodes):
            return
        found = self._find(node, tuple(result.shape))
        if found is not None:
            kind, lead = found
            self.kinds[node] = kind
            if lead is not None:
                self.lead[node] = lead
            if all(value in self.apart or value not in self.kinds for value in node.all_input_nodes):
                self.apart.add(node)

    def _is_end(self, node: Node) -> bool:
        """Whether nothing that is computed from a node's rows belongs to the part: another product's, whose gradient
        would lead through all layers of a model."""
        return self.kinds.get(node) is Kind.PRODUCT and node is not self.product

    def _find(self, node: Node, shape: tuple[int, ...]) -> tuple[Kind, int | None] | None:
        target, args = node.target, node.args
        if target in (aten.mm.default, aten.addmm.default):
            return self._find_product(node)
        first = args[0] if args and isinstance(args[0], Node) else None
        if target in _LOOK_UPS or target in (aten.cat.default, aten.slice_scatter.default):
            return self._find_along(node, shape)
        if target not in _RESHAPES | _TRANSPOSES | REDUCTIONS | {
            aten.expand.default, aten.slice.Tensor, aten.constant_pad_nd.default, aten.sum.default,
        }:  # fmt: skip
            return self._find_elementwise(node, shape)
        if target is aten.expand.default and first not in self.kinds:
            return (Kind.EXPANDED, lead) if first is not None and (lead := self._apart(node)) else None
        if first is None or first not in self.lead or node.all_input_nodes != [first]:
            return None
        lead = self.lead[first]
        given = tuple(first.meta["val"].shape)
        if target in _RESHAPES:
            leading = self._leading(shape)
            return None if leading is None else (Kind.RESHAPED, leading)
        if target in _TRANSPOSES:
            order = _order(node, len(given))
            if order[:lead] == list(range(lead)):
                return Kind.PERMUTED, lead
            return (Kind.TRANSPOSED, None) if lead == 1 and order == [1, 0] else None
        if target is aten.expand.default:
            same = len(shape) == len(given) and shape[:lead] == given[:lead]
            return (Kind.EXPANDED, lead) if same else None
        if target is aten.slice.Tensor:
            dim = _argument(node, 1, "dim", 0) % len(given)
            return (Kind.ALONG_A_DIM, lead) if dim >= lead else None
        if target is aten.constant_pad_nd.default:
            return (Kind.ALONG_A_DIM, lead) if len(args[1]) // 2 <= len(given) - lead else None  # type: ignore
        dims = reduced_dims(node)
        if all(dim >= lead for dim in dims):
            return Kind.REDUCED, lead
        is_sum = target in (aten.sum.default, aten.sum.dim_IntList) and set(range(lead)) <= set(dims)
        return (Kind.SUMMED_ROWS, None) if is_sum else None

    def _apart(self, node: Node) -> int | None:
        """The first dims of a wide value of which nothing is known but what it is computed from; ``None`` if there are
        none that could be the rows."""
        shape = tuple(node.meta["val"].shape)
        lead = self._leading(shape)
        if lead is None or WIDTH_RATIO * self.row_elements(node) <= self.width:
            return None
        values = [value.meta["val"] for value in node.all_input_nodes]
        fits = all(isinstance(value, torch.Tensor) and value.dim() <= len(shape) for value in values)
        fits = fits and all(self.outer(value, shape, lead) for value in node.all_input_nodes)
        return lead if fits and values else None

    def _leading(self, shape: Sequence[int]) -> int | None:
        """How many first dims of a shape number the rows."""
        elements = 1
        for dim, size in enumerate(shape):
            elements *= size
            if elements == self.count:
                return dim + 1
        return None

    def _find_product(self, node: Node) -> tuple[Kind, int | None] | None:
        given: Any = node.args
        *summand, left, right = given
        if self.lead.get(left) == 1 and right not in self.kinds:
            is_plain = not node.kwargs and all(
                value not in self.kinds and value.meta["val"].dim() == 1 for value in summand
            )
            return (Kind.PRODUCT, 1) if is_plain else None
        if summand:
            return None
        has_columns = self.kinds.get(left) is Kind.TRANSPOSED
        has_rows = self.lead.get(right) == 1
        if (has_columns or left not in self.kinds) and (has_rows or right not in self.kinds):
            return (Kind.SUMMED_PRODUCT, None) if has_columns or has_rows else None
        return None

    def _find_along(self, node: Node, shape: tuple[int, ...]) -> tuple[Kind, int | None] | None:
        """Concatenations and look-ups: all that they read has the same rows."""
        if node.target is aten.cat.default:
            tensors: Any = list(node.args[0])  # type: ignore[arg-type]
            dim = _argument(node, 1, "dim", 0)
        elif node.target is aten.slice_scatter.default:
            tensors, dim = list(node.args[:2]), _argument(node, 2, "dim", 0)
        else:
            values: Any = node.args
            tensors, dim = [values[0], *(value for value in values[2:] if isinstance(value, Node))], values[1]
        leads = {self.lead.get(tensor) for tensor in tensors if tensor in self.kinds}
        if not leads and WIDTH_RATIO * self.row_elements(node) > self.width:
            leads = {self._leading(shape)}
        if len(leads) != 1 or None in leads:
            return None
        (lead,) = leads
        assert lead is not None
        rows = shape[:lead]
        same = all(
            tuple(tensor.meta["val"].shape[:lead]) == rows and tensor.meta["val"].dim() == len(shape)
            for tensor in tensors
        )
        return (Kind.ALONG_A_DIM, lead) if same and dim % len(shape) >= lead else None

    def _find_elementwise(self, node: Node, shape: tuple[int, ...]) -> tuple[Kind, int | None] | None:
        target: Any = node.target
        if target not in _ELEMENTWISE and torch.Tag.pointwise not in getattr(target, "tags", ()):
            return None
        if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
            return None
        own = [value for value in node.all_input_nodes if value in self.kinds]
        if not own:
            return (Kind.ELEMENTWISE, lead) if (lead := self._apart(node)) else None
        leads = {self.lead.get(value) for value in own}
        if len(leads) != 1 or None in leads:
            return None
        (lead,) = leads
        assert lead is not None
        for value in own:
            given = value.meta["val"].shape
            if len(given) != len(shape) or tuple(given[:lead]) != shape[:lead]:
                return None
        others = (value for value in node.all_input_nodes if value not in self.kinds)
        fits = all(isinstance(v.meta["val"], torch.Tensor) and self.outer(v, shape, lead) for v in others)
        return (Kind.ELEMENTWISE, lead) if fits else None

    def outer(self, value: Node, shape: tuple[int, ...], lead: int) -> str:
        """How a value from outside goes into an elementwise operation with a result of this shape: "whole" if it has no
        rows, "rows" if it has them all, "spread" if only some of the first dims and few elements beside; "" if not."""
        given = value.meta["val"].shape
        if any(not isinstance(size, int) for size in given):
            return ""
        full = (1,) * (len(shape) - len(given)) + tuple(given)
        if all(size == 1 for size in full[:lead]):
            return "whole"
        if full[:lead] == shape[:lead]:
            return "rows"
        return "spread" if WIDTH_RATIO * prod(full[lead:]) <= self.width else ""


@dataclass
class SomeRows:
    """The nodes of the part for some of the rows.

    Attributes:
        rows: the part.
        count: how many rows.
        values: a node's value for these rows.
        call: makes a node, like another one.
        outer: what stands for a value from outside.
        flat: what stands for one that has rows as its first dims, as ``[N, *rest]``.
        pick: takes the rows from such a value, along a dim.
    """

    rows: Rows
    count: int
    call: Call
    outer: Callable[[Node], Node]
    flat: Callable[[Node, tuple[int, ...], int], Node]
    pick: Callable[[Node, Node, int], Node]
    values: dict[Node, Node] = field(default_factory=dict)

    def compute(self, node: Node) -> None:
        """Makes the node's value, of a sum that over these rows; those of its arguments are there."""
        self.values[node] = self._computed(node)

    def _computed(self, node: Node) -> Node:
        kind = self.rows.kinds[node]
        result = node.meta["val"]
        shape = tuple(result.shape)
        if kind is Kind.SUMMED_ROWS:
            return self._summed(node)
        if kind is Kind.PRODUCT:
            return self.call(node, node.target, *map_arg(node.args, self._any))
        if kind is Kind.TRANSPOSED:
            return self.call(node, aten.t.default, self.values[node.all_input_nodes[0]])
        lead = self.rows.lead[node]
        own_shape = [self.count, *shape[lead:]]
        if kind is Kind.RESHAPED:
            return self._reshaped(node, self.values[node.all_input_nodes[0]], own_shape)
        if kind is Kind.PERMUTED:
            order = _order(node, len(shape))[lead:]
            value = self.values[node.all_input_nodes[0]]
            return self.call(node, aten.permute.default, value, [0, *(dim - lead + 1 for dim in order)])
        if kind is Kind.EXPANDED:
            value = self._taken(node.all_input_nodes[0], shape, lead, node)
            return self.call(node, aten.expand.default, value, own_shape)
        if kind is Kind.ELEMENTWISE:
            taken = {value: self._taken(value, shape, lead, node) for value in node.all_input_nodes}
            args, kwargs = map_arg((node.args, node.kwargs), taken.__getitem__)
            return self.call(node, node.target, *args, **kwargs)
        first: Any = node.all_input_nodes[0]
        shift = lead - 1
        if kind is Kind.REDUCED:
            dims: Any = [dim - shift for dim in reduced_dims(node)]
            if isinstance(_argument(node, 1, "dim", None), int):
                (dims,) = dims
            rest = _without_dim(node.kwargs)
            return self.call(node, node.target, self.values[first], dims, *node.args[2:], **rest)
        return self._along_a_dim(node, shape, lead, shift)

    def _along_a_dim(self, node: Node, shape: tuple[int, ...], lead: int, shift: int) -> Node:
        def take(value: Node) -> Node:
            return self.values[value] if value in self.values else self._picked(value, shape, lead, node)

        if node.target is aten.constant_pad_nd.default:
            return self.call(node, node.target, take(node.all_input_nodes[0]), *node.args[1:], **node.kwargs)
        if node.target is aten.cat.default:
            dim = _argument(node, 1, "dim", 0) % len(shape) - shift
            return self.call(node, node.target, [take(v) for v in node.args[0]], dim)  # type: ignore
        given: Any = node.args
        if node.target is aten.slice_scatter.default:
            dim = _argument(node, 2, "dim", 0) % len(shape) - shift
            rest = _without_dim(node.kwargs)
            return self.call(node, node.target, take(given[0]), take(given[1]), dim, *given[3:], **rest)
        if node.target in _LOOK_UPS:
            tensor, dim, *others = given
            others = [take(value) if isinstance(value, Node) else value for value in others]
            return self.call(
                node, node.target, take(tensor), dim % len(shape) - shift, *others, **node.kwargs
            )
        dim = _argument(node, 1, "dim", 0) % len(shape) - shift
        rest = _without_dim(node.kwargs)
        return self.call(node, node.target, take(node.all_input_nodes[0]), dim, *node.args[2:], **rest)

    def _reshaped(self, node: Node, value: Node, shape: list[int]) -> Node:
        if list(value.meta["val"].shape) == shape:
            return value
        return reshaped(self.call, node, value, shape)

    def _taken(self, value: Node, shape: tuple[int, ...], lead: int, node: Node) -> Node:
        """A tensor that an elementwise operation reads."""
        if value in self.values:
            return self.values[value]
        if self.rows.outer(value, shape, lead) != "whole":
            return self._picked(value, shape, lead, node)
        given = value.meta["val"].shape
        rest = len(shape) - lead
        if len(given) <= rest:
            return self.outer(value)
        return self._reshaped(node, self.outer(value), [1, *given[len(given) - rest :]])

    def _picked(self, value: Node, shape: tuple[int, ...], lead: int, node: Node) -> Node:
        return self.pick(node, self.flat(value, shape, lead), 0)

    def factors(self, node: Node) -> tuple[Node, Node]:
        """The left and the right factor of a product that is summed over rows."""
        factors: list[Node] = []
        for dim, factor in zip((1, 0), node.all_input_nodes, strict=True):
            value = self._any(factor)
            if factor not in self.values:
                value = self.pick(node, value, dim)
            factors.append(value)
        return factors[0], factors[1]

    def _any(self, value: Node) -> Node:
        return self.values[value] if value in self.values else self.outer(value)

    def _summed(self, node: Node) -> Node:
        value = self.values[node.all_input_nodes[0]]
        lead = self.rows.lead[node.all_input_nodes[0]]
        dims = [0, *(dim - lead + 1 for dim in reduced_dims(node) if dim >= lead)]
        dtype = sum_dtype(node.meta["val"].dtype)
        return self.call(node, aten.sum.dim_IntList, value, dims, False, dtype=dtype)


def reshaped(call: Call, like: Node, value: Node, shape: list[int]) -> Node:
    """The value in another shape: a view where its strides allow that."""
    try:
        value.meta["val"].view(shape)
    except (RuntimeError, ValueError):
        value = call(like, aten.clone.default, value, memory_format=torch.contiguous_format)
    return call(like, aten.view.default, value, shape)


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _order(node: Node, rank: int) -> list[int]:
    """Which of its argument's dims a transposed value's dims are."""
    given: Any = node.args
    if node.target is aten.permute.default:
        return [dim % rank for dim in given[1]]
    order = list(range(rank))
    one, other = (dim % rank for dim in (given[1:3] or (0, 1))) if rank > 1 else (0, 0)
    order[one], order[other] = order[other], order[one]
    return order


def _without_dim(kwargs: Any) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "dim"}


def reduced_dims(node: Node) -> list[int]:
    """The dims that a reduction reduces, nonnegative."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    given = None if node.target is aten.sum.default else _argument(node, 1, "dim", None)
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rank))
    return [dim % rank for dim in (given if isinstance(given, (list, tuple)) else [given])]
