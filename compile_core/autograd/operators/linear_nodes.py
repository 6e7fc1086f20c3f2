"""Which values of a graph are another one's multiples: computed from it by nothing but linear operators.

A gradient is linear in the gradient that arrives. Where that is one number, a backward can be computed before the
number is known, for a one in its place, and multiplied in the end.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.autograd.operators.kinds import is_view

aten = torch.ops.aten

# Linear in their only tensor.
_UNARY = {
    aten.neg.default, aten.clone.default, aten._to_copy.default, aten.sum.default, aten.sum.dim_IntList,
    aten.mean.default, aten.mean.dim, aten.flip.default, aten.repeat.default,
}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def is_linear(node: Node, varying: Set[Node]) -> bool:
    """Whether the node is linear in those of its arguments that are among ``varying``, all of them together."""
    target, args = node.target, node.args
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not result.dtype.is_floating_point:
        return False

    def varies(*values: Any) -> int:
        return sum(isinstance(value, Node) and value in varying for value in values)

    def scales(*values: Any) -> bool:
        return all(varies(value) or is_zero(value) for value in values)

    if target in _ZEROS:
        return True
    if target in _UNARY or (is_view(node) and isinstance(target, torch._ops.OpOverload)):
        return True
    if target in (aten.mul.Tensor, aten.mul.Scalar, aten.mm.default, aten.bmm.default):
        return varies(*args[:2]) == 1
    if target in (aten.div.Tensor, aten.div.Scalar, aten.gather.default):
        return varies(args[0]) == 1 and not varies(*args[1:])
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return scales(*args[:2])
    if target is aten.where.self:
        return not varies(args[0]) and scales(*args[1:])
    if target in (aten.scatter_add.default, aten.scatter.src):
        return scales(args[0], args[3]) and not varies(args[2])
    if target is aten.slice_scatter.default:
        return scales(*args[:2])
    if target is aten.cat.default:
        return scales(*args[0])  # type: ignore[misc]
    if target is aten.constant_pad_nd.default:
        return is_zero(args[2] if len(args) > 2 else 0)
    return False


def is_zero(value: Any) -> bool:
    """Whether this is the number zero, or a tensor that is made of zeros."""
    while isinstance(value, Node):
        if value.target in _ZEROS:
            return True
        if value.target is aten.scalar_tensor.default:
            return is_zero(value.args[0])
        if value.target in (aten.full.default, aten.full_like.default):
            return is_zero(value.args[1])
        if not (is_view(value) or value.target is aten._to_copy.default):
            return False
        value = value.args[0]
    return isinstance(value, (int, float)) and value == 0
