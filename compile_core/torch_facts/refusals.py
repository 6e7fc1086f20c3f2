"""Which operators' kernels raise for what their data are: an index out of range, a divisor of zero, a matrix of NaN."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten

_FOR_INDICES = {
    aten.index, aten.gather, aten.index_select, aten.take, aten.embedding, aten._embedding_bag,
    aten._embedding_bag_forward_only, aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add,
    aten.index_copy, aten.index_fill, aten.index_put, aten.index_reduce, aten.put, aten.masked_scatter,
    aten.nll_loss_forward, aten.nll_loss2d_forward, aten.multi_margin_loss, aten.multilabel_margin_loss_forward,
    aten.max_unpool2d, aten.max_unpool3d, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
_FOR_NUMBERS = {
    aten.histc, aten.cholesky, aten.cholesky_inverse, aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig,
    aten._linalg_eigvals, aten.linalg_pinv, aten.linalg_inv_ex, aten._linalg_solve_ex, aten.linalg_cholesky_ex,
}  # fmt: skip
_DIVISIONS = {aten.div, aten.floor_divide, aten.remainder, aten.fmod}


def may_refuse(node: Node) -> bool:
    """Whether the operator of a node may raise when it runs, as far as is known: of torch's kernels for GPUs, which end
    the process, none does, and what others have written may."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims", "prim"):
        return True
    packet = node.target.overloadpacket
    given = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    if packet in _DIVISIONS:
        return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    return packet in _FOR_INDICES or packet in _FOR_NUMBERS
