"""Which kind an operator is: a view, cheap enough for the backward to compute again, or a reduction.

Recomputing costs nothing where the value is fused into the kernel that needs it: views, pointwise operators
and creations, among them random numbers that are functions of a seed. Matrix products, convolutions, attention,
operators that move a generator and reductions are never computed twice. The classes follow the default policy of
AOTAutograd's min-cut partitioner.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from gradsplit.compile_core.ir.counter_random import COUNTER_OPERATORS
from gradsplit.compile_core.ir.scatters import combines_at_indices
from gradsplit.compile_core.torch_facts.dispatcher import is_random

aten = torch.ops.aten

_VIEWS = {
    aten.view, aten.reshape, aten._unsafe_view, aten.permute, aten.t, aten.transpose, aten.expand,
    aten.squeeze, aten.unsqueeze, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.as_strided, aten.diagonal, aten.unfold,
}  # fmt: skip
_CREATIONS = {aten.full, aten.zeros, aten.ones, aten.arange, aten.scalar_tensor, aten.full_like,
              aten.zeros_like, aten.ones_like, aten.empty, aten.empty_like}  # fmt: skip
_CHEAP = {aten.clone, aten.where, aten.cat, aten.tril, aten.triu, aten._to_copy, aten.index, aten.gather,
          aten.index_select, aten.embedding, aten.constant_pad_nd, aten.flip, aten.repeat,
          aten.logical_not}  # fmt: skip


def packet(node: Node) -> object:
    """The operator without its overload, or the plain function of a node."""
    return getattr(node.target, "overloadpacket", node.target)


def is_view(node: Node) -> bool:
    """Whether the node only describes its argument's memory anew."""
    return node.target is operator.getitem or packet(node) in _VIEWS


def is_recomputable(node: Node) -> bool:
    """Whether computing the node again is about as cheap as reading its result."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_random(node):
        return False
    if (
        is_view(node)
        or packet(node) in _CREATIONS
        or packet(node) in _CHEAP
        or node.target in COUNTER_OPERATORS
    ):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_fusible(node: Node) -> bool:
    """Whether the node's value can stay inside a generated kernel that produces or consumes it."""
    return is_recomputable(node) or is_reduction(node)


def is_read_in_a_kernel(user: Node) -> bool:
    """Whether what a node reads can stay inside a generated kernel, as what it adds at indices."""
    return is_fusible(user) or combines_at_indices(user)


def is_reduction(node: Node) -> bool:
    """Whether the node combines elements in a generated kernel."""
    return packet(node) in _REDUCTIONS


_REDUCTIONS = {
    aten.sum,
    aten.mean,
    aten.amax,
    aten.amin,
    aten.prod,
    aten.any,
    aten.all,
    aten.var,
    aten.var_mean,
}
