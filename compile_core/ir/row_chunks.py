"""Operators of joint graphs in which a computation goes over a matrix chunk by chunk of its rows.

``AFTER`` is its first argument, and says that some other values are complete before anything is computed from it: only
so is what one chunk holds in memory gone before the next begins. ``WIDE_PRODUCT`` and ``ADD_PRODUCT`` add the products
of all chunks up in one place; of 16-bit factors in float32, since sums rounded after each chunk would lose what single
products keep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

_library = torch.library.Library("gradsplit", "FRAGMENT")
_library.define("after(Tensor value, Tensor[] others) -> Tensor")
_library.define("wide_product(Tensor left, Tensor right) -> Tensor")
_library.define("add_product(Tensor total, Tensor left, Tensor right) -> Tensor")
_library.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> Tensor(a!)")


def _after(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    # The very memory: whoever reads it holds it.
    return aten.alias.default(value)


def _like_value(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    dtype = sum_dtype(left.dtype)
    if left.dtype == dtype:
        return torch.mm(left, right)
    if multiplies_wide(left.device, left.dtype):
        return aten.mm.dtype(left, right, dtype)
    return torch.mm(left, right).to(dtype)


def _wide_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=sum_dtype(left.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _add_product_in_place(total.clone(), left, right)


def _like_total(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.empty_like(total)


def _add_product_in_place(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``total`` is ``[n, m]``, ``left`` ``[n, k]`` and ``right`` ``[k, m]``; ``total`` may be wider than the two."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda and _adds_wide(left.device, left.dtype):
        return aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    return total.add_(torch.mm(left, right))


def _in_place_shape(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's product of this dtype can add to a matrix of float32; not all versions' can."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.zeros(16, 16, device=device)
    try:
        aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def multiplies_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's product of matrices of a 16-bit dtype can yield float32; it can on GPUs."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


for _name, _run, _shape in (
    ("after", _after, _like_value),
    ("wide_product", _wide_product, _wide_shape),
    ("add_product", _add_product, _like_total),
    ("add_product_", _add_product_in_place, _in_place_shape),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradsplit::{_name}", _shape, lib=_library)

AFTER = torch.ops.gradsplit.after.default
WIDE_PRODUCT = torch.ops.gradsplit.wide_product.default
ADD_PRODUCT = torch.ops.gradsplit.add_product.default
ADD_PRODUCT_ = torch.ops.gradsplit.add_product_.default


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over chunks are added up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
