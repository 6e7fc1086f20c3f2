"""Stage between trace and partition: pads odd sides of matrices with zeros, so that products read them aligned.

GPT-2 has a vocabulary of 50257. Tensor cores want sides in multiples of 16 bytes: the logits' product, and the two of
their gradient, run at a sixth of their speed. So a product is computed with its odd sides made longer: zeros stand
after its operands, and what follows reads the part of the result that was asked for, through strides. Zeros after
both operands' inner sides add nothing to any element, and elements computed from zeros alone are read by nobody.

It costs nothing where a generated kernel computes the operand: that writes its rows a few elements further apart, and
whatever else reads the operand reads it there. An operand that lies in memory already is copied, as is a result that
goes outside or to one of torch's kernels, whose strides must be eager's; that is done where the product gains more.
As forward and backward are still one graph here, a padded matrix that the forward saves serves the backward as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call
from gradsplit.compile_core.autograd.operators.kinds import is_fusible, is_view
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.numbers import is_number, is_sized_by_data
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation

aten = torch.ops.aten

# Each product, and where its two factors stand among its arguments; what is added stands before them.
_PRODUCTS = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1,
}  # fmt: skip
_ALIGNED_BYTES = 16
_LEAST_SIDE = 64
# Multiplications below which starting kernels is what takes the time.
_LEAST_WORK = 1 << 26
# As many multiplications gain what the copy of one element costs.
_WORK_OF_A_COPY = 256


def pad_products(joint: JointGraph, with_float32: bool, device_type: str = "cuda") -> JointGraph:
    """The joint graph with padded products; changes its module and returns it.

    Args:
        with_float32: pad float32 too, which tensor cores multiply in the format TF32 only.
        device_type: of the tensors whose products are padded.
    """
    dtypes = (torch.float16, torch.bfloat16, *([torch.float32] if with_float32 else []))
    padding = _Padding(joint.module.graph)
    for node in list(joint.module.graph.nodes):
        if node.target in _PRODUCTS:
            result = node.meta["val"]
            # Where sizes depend on data, whether a tensor is contiguous is not known.
            is_known = not any(is_sized_by_data(each.meta["val"]) for each in (node, *node.all_input_nodes))
            if is_known and result.device.type == device_type and result.dtype in dtypes:
                padding.pad_product(node)
    padding.finish()
    joint.module.graph.lint()
    joint.module.recompile()
    return joint


@dataclass
class _Padding:
    """The graph while its products are padded.

    Attributes:
        graph: it.
        padded: for a value, and the dim and number of zeros, the longer one.
        made: these, and what makes them.
    """

    graph: Graph
    padded: dict[tuple[Node, int, int], Node] = field(default_factory=dict)
    made: set[Node] = field(default_factory=set)

    def pad_product(self, product: Node) -> None:
        """Computes a product with longer sides, if it has odd ones and gains more than copies cost."""
        operator: Any = product.target
        first = _PRODUCTS[operator]
        given: Any = product.args
        left, right = given[first : first + 2]
        missing = _missing(product, left, right)
        if not any(missing) or not _pays(product, left, right, missing):
            return
        rows, inner, columns = missing
        arguments = list(given)
        arguments[first] = self._longer(self._longer(left, -2, rows), -1, inner)
        arguments[first + 1] = self._longer(self._longer(right, -2, inner), -1, columns)
        if first:
            arguments[0] = self._longer_summand(arguments[0], product, rows, columns)
        with self.graph.inserting_after(product):
            longer = add_call(self.graph, product, operator, *arguments, **product.kwargs)
        result = longer
        for dim, count in ((-2, rows), (-1, columns)):
            if count:
                result = _beginning(self.graph, result, dim, product.meta["val"].shape[dim])
        _replace(product, result)

    def _longer(self, value: Node, dim: int, count: int) -> Node:
        """The value with ``count`` zeros at the end of one of its last two dims."""
        if not count:
            return value
        if value.target in (aten.t.default, aten.transpose.int) and _swaps_last_two(value):
            transpose: Any = value.target
            base, *dims = value.args
            assert isinstance(base, Node)
            longer = self._longer(base, -3 - dim, count)
            with self.graph.inserting_after(longer):
                return add_call(self.graph, value, transpose, longer, *dims)
        key = (value, dim, count)
        if key not in self.padded:
            self.padded[key] = self._with_zeros(value, dim, count)
        return self.padded[key]

    def _with_zeros(self, value: Node, dim: int, count: int) -> Node:
        place = value if value.op != "placeholder" else list(self.graph.find_nodes(op="placeholder"))[-1]
        along = value.meta["val"].dim() + dim
        with self.graph.inserting_after(place):
            # Of the value's shape, whose other sides may be open.
            shape = add_call(self.graph, value, aten.slice.Tensor, value, along, 0, count)
        with self.graph.inserting_after(shape):
            zeros = add_call(self.graph, value, aten.zeros_like.default, shape)
        with self.graph.inserting_after(zeros):
            longer = add_call(self.graph, value, aten.cat.default, [value, zeros], along)
        self.made |= {shape, zeros, longer}
        return longer

    def _longer_summand(self, summand: Node, product: Node, rows: int, columns: int) -> Node:
        """What is added to the product, which may be broadcast along any dim."""
        shape, wanted = summand.meta["val"].shape, product.meta["val"].shape
        for dim, count in ((-2, rows), (-1, columns)):
            if count and len(shape) >= -dim and shape[dim] == wanted[dim] != 1:
                summand = self._longer(summand, dim, count)
        return summand

    def finish(self) -> None:
        """Lets whatever else reads a padded value of a generated kernel read it where it is padded."""
        for (value, dim, _), longer in self.padded.items():
            if value in self.made or not _is_generated(value):
                continue
            others = [user for user in value.users if user not in self.made and not _needs_strides(user)]
            if others:
                beginning = _beginning(self.graph, longer, dim, value.meta["val"].shape[dim])
                for user in others:
                    user.replace_input_with(value, beginning)
                _settle_readers(beginning, lambda value=value: value)


def _missing(product: Node, left: Node, right: Node) -> tuple[int, int, int]:
    """How many rows, inner elements and columns are missing to whole multiples, where they lie next to each other."""
    multiple = _ALIGNED_BYTES // product.meta["val"].dtype.itemsize
    rows, inner = left.meta["val"].shape[-2:]
    columns = right.meta["val"].shape[-1]
    left_rows, left_inner = _are_neighbours(left)
    right_inner, _ = _are_neighbours(right)
    lie_together = (left_rows, left_inner or right_inner, True)
    missing = [
        -side % multiple if matters and isinstance(side, int) and side >= _LEAST_SIDE else 0
        for side, matters in zip((rows, inner, columns), lie_together, strict=True)
    ]
    return missing[0], missing[1], missing[2]


def _are_neighbours(matrix: Node) -> tuple[bool, bool]:
    """Whether the elements of a column, and those of a row, lie next to each other."""
    stride = matrix.meta["val"].stride()
    return value_at_compilation(stride[-2]) == 1, value_at_compilation(stride[-1]) == 1


def _pays(product: Node, left: Node, right: Node, missing: tuple[int, int, int]) -> bool:
    rows, inner, columns = missing
    work = _count(product) * value_at_compilation(left.meta["val"].shape[-1])
    copied = _count(left) if (rows or inner) and not _is_generated(left) else 0
    copied += _count(right) if (inner or columns) and not _is_generated(right) else 0
    is_strided = columns or (rows and product.meta["val"].dim() > 2)
    copied += _count(product) if is_strided and _goes_outside(product) else 0
    return work >= max(_LEAST_WORK, copied * _WORK_OF_A_COPY)


def _count(node: Node) -> int:
    return value_at_compilation(node.meta["val"].numel())


def _is_generated(value: Node) -> bool:
    """Whether a generated kernel writes the value."""
    while is_view(value) and isinstance(value.args[0], Node):
        value = value.args[0]
    return value.op == "call_function" and is_fusible(value)


def _goes_outside(value: Node) -> bool:
    """Whether something reads the value that must find eager's strides."""
    return any(_needs_strides(user) for user in value.users)


def _needs_strides(user: Node) -> bool:
    return _goes_outside(user) if _is_plain_view(user) else not _takes_strides(user)


def _takes_strides(user: Node) -> bool:
    """Whether a reader that is no view asks only for elements and sizes."""
    if is_number(user):
        return user.target is aten.sym_size.int
    is_generated = user.op == "call_function" and is_fusible(user) and not is_view(user)
    return is_generated or user.target in _PRODUCTS


def _is_plain_view(node: Node) -> bool:
    """Whether the node describes its argument anew whatever the argument's strides."""
    return is_view(node) and node.target is not aten.as_strided.default


def _swaps_last_two(node: Node) -> bool:
    rank = node.meta["val"].dim()
    dims: Any = node.args[1:] or (0, 1)
    return rank >= 2 and sorted(dim % rank for dim in dims) == [rank - 2, rank - 1]


def _beginning(graph: Graph, value: Node, dim: int, length: int) -> Node:
    with graph.inserting_after(value):
        return add_call(graph, value, aten.slice.Tensor, value, value.meta["val"].dim() + dim, 0, length)


def _replace(product: Node, result: Node) -> None:
    """Puts the beginning of a longer product in the place of the product."""
    product.replace_all_uses_with(result)
    product.graph.erase_node(product)

    @cache
    def row_major() -> Node:
        with result.graph.inserting_after(result):
            return add_call(
                result.graph, result, aten.clone.default, result, memory_format=torch.contiguous_format
            )

    _settle_readers(result, row_major)


def _settle_readers(value: Node, plain: Callable[[], Node]) -> None:
    """Follows new strides through views, and lets those that need eager's read what has them.

    Args:
        value: what has other strides now.
        plain: makes the same value with eager's, once. Of a view, it is the view of that: what a view leaves out lies
            between its elements in eager, and operators give results in the order of their argument's strides.
    """
    for user in list(value.users):
        strides = _strides_of(user) if _is_plain_view(user) else None
        if strides is not None:
            eager = user.meta["val"]

            @cache
            def plain_view(view: Node = user, eager: Any = eager) -> Node:
                source = plain()
                with view.graph.inserting_after(view):
                    copied = view.graph.node_copy(view, lambda node: source if node is value else node)
                copied.meta["val"] = eager
                return copied

            user.meta["val"] = strides
            _settle_readers(user, plain_view)
        elif not _takes_strides(user) and not value.meta["val"].is_contiguous():
            user.replace_input_with(value, plain())


def _strides_of(view: Node) -> Any:
    """The fake value of a view of an argument that has other strides now; ``None`` if there is no such view."""
    operator: Any = view.target
    arguments: Any = map_arg(view.args, lambda node: node.meta["val"])
    try:
        return operator(*arguments, **view.kwargs)
    except (RuntimeError, ValueError):
        return None
