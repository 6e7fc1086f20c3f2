"""What torch's kernels do with small tensors that are like others, where forms in Python do not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from gradsplit.compile_core.torch_facts.dispatcher import is_random_call
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation
from gradsplit.compile_core.torch_facts.thread_state import disable_current_modes

aten = torch.ops.aten
# Of the elementwise operators those that do not promote.
_OF_ONE_DTYPE = frozenset([aten.complex.default, aten.heaviside.default, aten.polar.default])


def small(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of at most two elements a dim, with strides of the same order; equal ones stay equal."""
    shape = [min(value_at_compilation(size), 2) for size in tensor.shape]
    strides = [value_at_compilation(stride) for stride in tensor.stride()]
    small, step = {0: 0}, 1
    for stride in sorted({*strides} - {0}):
        small[stride] = step
        step *= prod(size for size, of in zip(shape, strides, strict=True) if of == stride) + 1
    memory = torch.zeros(step, dtype=dtype or tensor.dtype, device="cpu")
    return memory.as_strided(shape, [small[stride] for stride in strides])


def refuse_dtypes(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises what the CPU's kernel raises for floats of several types, where forms in Python promote or do not look."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    promotes = torch.Tag.pointwise in func.tags and func not in _OF_ONE_DTYPE
    if len(dtypes) < 2 or promotes or func.namespace != "aten":
        return
    if any(tensor.device.type != "cpu" for tensor in tensors) or is_random_call(func, args, kwargs):
        return
    with disable_current_modes(), torch.no_grad():
        # Other arguments may say how large the tensors are, so that small ones do not do.
        for like in (small, _as_large):
            refusal = _refusal(func, args, kwargs, like, None)
            if refusal is None:
                return
            if _refusal(func, args, kwargs, like, torch.float32) is None:
                raise refusal


def _as_large(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    shape = [value_at_compilation(size) for size in tensor.shape]
    return torch.zeros(shape, dtype=dtype or tensor.dtype)


def _refusal(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    like: Callable[[Tensor, torch.dtype | None], Tensor],
    dtype: torch.dtype | None,
) -> Exception | None:
    """What a call raises for tensors like those given, floats among them of one type if there is one given."""

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value_at_compilation(value)
        return like(value, dtype if value.is_floating_point() else None)

    try:
        func(*tree_map(plain, args), **tree_map(plain, dict(kwargs)))
    except Exception as error:
        return error.with_traceback(None)
    return None
