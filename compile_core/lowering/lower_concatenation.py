"""Concatenation: one nest per part, each storing into its window of one buffer.

Reductions over dims that were not concatenated go to the parts instead: their nests then fuse with those that
store the parts. (Attention's gradients are concatenated, stored and summed over rows in one nest this way.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_core.ir.loops import View
from compile_core.ir.tensor_spec import TensorSpec
from compile_core.lowering.lower_builder import ProgramBuilder, dense_strides
from compile_core.lowering.lower_plan import numel_of
from compile_core.lowering.lower_values import LazyTensor
from compile_core.lowering.reduction_rules import Reduction, lower_reduction
from compile_core.lowering.view_rules import reshaped, restride

aten = torch.ops.aten


def concatenate(
    builder: ProgramBuilder, node: torch.fx.Node, args: Any, kwargs: Any, place: View | None
) -> LazyTensor:
    fake = node.meta["val"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim = dim % max(fake.dim(), 1)
    spec = TensorSpec(tuple(fake.shape), dense_strides(fake.shape, fake.stride()), fake.dtype, fake.device)
    place = place or builder.new_buffer(node.name, spec)
    start = 0
    for tensor in args[0]:
        if tensor.shape == (0,) and fake.dim() != 1:
            continue
        length = tensor.shape[dim]
        window = restride(place, lambda t, start=start, length=length: t.narrow(dim, start, length))
        assert window is not None
        builder.store_into(window, tensor)
        start += length
    return builder.in_memory(place, tuple(fake.stride()), node.name)


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
        window = restride(place, lambda t, start=start, length=length: t.narrow(-1, start, length))
        assert window is not None
        like = torch.empty(window.shape, dtype=fake.dtype, device="meta")
        lower_reduction(builder, part, reduction, like, node.name, window)
        start += length
    return builder.in_memory(place, tuple(fake.stride()), node.name)
