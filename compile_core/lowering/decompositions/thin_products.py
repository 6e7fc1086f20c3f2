"""Products of long matrices with a few columns, as sums that fuse with what is beside them.

Heads of attention that are mixed by a linear layer (talking heads) are such products: two of three sides are the number
of heads. A library's kernels for tensor cores, which take blocks of at least eight columns and of aligned rows, need
many times as long for these as reading and writing takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS, compute_dtype

_FEW = 8
_MANY = 1 << 12


def mm(left: Tensor, right: Tensor) -> Any:
    """Decomposition of ``aten.mm``; declines where at least two sides are not short."""
    total = _sum(left, right)
    return NotImplemented if total is None else total.to(left.dtype)


def addmm(summand: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Decomposition of ``aten.addmm``, likewise."""
    total = _sum(left, right) if (beta, alpha) == (1, 1) else None
    return NotImplemented if total is None else (total + summand).to(left.dtype)


def _sum(left: Tensor, right: Tensor) -> Tensor | None:
    """The product in the dtype that is computed in."""
    (rows, inner), columns = left.shape, right.shape[1]
    if left.dtype not in HALF_FLOATS | {torch.float32} or not _is_few(columns):
        return None
    wide = compute_dtype(left.dtype)
    if _is_few(inner) and _is_many(rows):
        terms = [left[:, k : k + 1].to(wide) * right[k : k + 1].to(wide) for k in range(inner)]
        return sum(terms[1:], terms[0])
    if _is_few(rows) and _is_many(inner):
        return (left.t().to(wide).unsqueeze(2) * right.to(wide).unsqueeze(1)).sum(0)
    return None


def _is_few(side: Any) -> bool:
    return isinstance(side, int) and 0 < side <= _FEW


def _is_many(side: Any) -> bool:
    return isinstance(side, int) and side >= _MANY
