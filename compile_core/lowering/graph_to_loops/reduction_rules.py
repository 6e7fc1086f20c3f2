"""Reductions: what is accumulated, over which dims, in which dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, compute_dtype, contiguous_strides
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import ProgramBuilder, pointwise
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Reduction:
    """One reduction of a call.

    Attributes:
        operation: of ``gradsplit.compile_core.ir.loops.REDUCTIONS``.
        dims: reduced dims, nonnegative; all of them for a full reduction.
        keepdim: whether the result keeps them with size 1.
        accumulator: dtype of the accumulator.
        divisor: the result is divided by it.
        flat: the position is one in the flattened tensor.
    """

    operation: str
    dims: tuple[int, ...]
    keepdim: bool
    accumulator: torch.dtype
    divisor: int = 1
    flat: bool = False


# target -> (operation, whether the dims are the second argument)
_TARGETS: Mapping[torch._ops.OpOverload, tuple[str, bool]] = {
    aten.sum.default: ("sum", False),
    aten.sum.dim_IntList: ("sum", True),
    aten.mean.default: ("mean", False),
    aten.mean.dim: ("mean", True),
    aten.prod.default: ("prod", False),
    aten.prod.dim_int: ("prod", True),
    aten.amax.default: ("max", True),
    aten.amin.default: ("min", True),
    aten.max.default: ("max", False),
    aten.min.default: ("min", False),
    aten.any.default: ("any", False),
    aten.any.dim: ("any", True),
    aten.any.dims: ("any", True),
    aten.all.default: ("all", False),
    aten.all.dim: ("all", True),
    aten.all.dims: ("all", True),
    aten.argmax.default: ("argmax", True),
    aten.argmin.default: ("argmin", True),
}
_WITH_POSITIONS = {aten.max.dim: "max", aten.min.dim: "min"}
_OF_NOTHING: Mapping[str, float] = {
    "sum": 0,
    "prod": 1,
    "any": 0,
    "all": 1,
    "mean": nan,
    "max": -inf,
    "min": inf,
}


def is_reduction(target: Any) -> bool:
    return target in _TARGETS or target in _WITH_POSITIONS


def has_positions(target: Any) -> bool:
    """Whether the call yields a pair: extrema and their positions."""
    return target in _WITH_POSITIONS


def reductions_of(
    target: torch._ops.OpOverload,
    tensor: LazyTensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
) -> list[Reduction]:
    """The reductions of a call, one per result, in order of the results."""
    rank = len(tensor.shape)
    if target in _WITH_POSITIONS:
        dims = _dims(args[1], rank)
        keepdim = _argument(args, kwargs, 2, "keepdim", False)
        name = _WITH_POSITIONS[target]
        return [
            Reduction(name, dims, keepdim, compute_dtype(tensor.dtype)),
            Reduction(f"arg{name}", dims, keepdim, torch.int64),
        ]
    operation, has_dims = _TARGETS[target]
    wanted = _argument(args, kwargs, 1, "dim", None) if has_dims else None
    keepdim = _argument(args, kwargs, 2, "keepdim", False) if has_dims else False
    flat = operation.startswith("arg") and wanted is None and rank > 1
    dims = _dims(wanted, rank)
    accumulator = compute_dtype(result.dtype)
    divisor = 1
    if operation == "mean":
        operation, divisor = "sum", prod(tensor.shape[d] for d in dims)
    elif operation in ("any", "all"):
        accumulator = torch.bool
    elif accumulator == torch.bool:
        operation = {"max": "any", "min": "all"}.get(operation, operation)
    return [Reduction(operation, dims, keepdim, accumulator, divisor, flat)]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _dims(wanted: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    if wanted is None or (isinstance(wanted, Sequence) and not wanted):
        return tuple(range(rank))
    chosen = [wanted] if isinstance(wanted, int) else wanted
    return tuple(sorted({d % rank for d in chosen})) if rank else ()


def lower_reduction(
    builder: ProgramBuilder,
    tensor: LazyTensor,
    reduction: Reduction,
    result: torch.Tensor,
    origin: str,
    place: View | None,
) -> LazyTensor:
    """Emits the nest of one reduction.

    Args:
        result: the fake value.
        place: where the result must be stored; a new temporary if ``None``.
    """
    count = prod(tensor.shape[d] for d in reduction.dims)
    if result.numel() and not count:
        operation = "mean" if reduction.divisor == 0 else reduction.operation
        identity = _OF_NOTHING[operation]
        return pointwise(result, origin, lambda emitter, _: emitter.constant(identity, result.dtype), Cost())
    if count == 1 and reduction.operation.startswith("arg"):
        return pointwise(result, origin, lambda emitter, _: emitter.constant(0, result.dtype), Cost())
    if place is None:
        spec = TensorSpec(
            tuple(result.shape), contiguous_strides(tuple(result.shape)), result.dtype, result.device
        )
        place = builder.new_buffer(origin, spec)

    target, dims = place, reduction.dims
    if reduction.flat and result.numel():
        tensor = builder.in_memory(_row_major_view(builder, tensor), (1,), tensor.origin)
        target, dims = View(place.buffer, (), (), place.offset), (0,)

    def finish(emitter: Emitter, value: int) -> int:
        if reduction.divisor != 1:
            divisor = emitter.constant(reduction.divisor, reduction.accumulator)
            value = emitter.apply("div", (value, divisor), reduction.accumulator)
        return emitter.cast(value, result.dtype)

    if result.numel():
        builder.reduce_into(target, tensor, dims, reduction.operation, reduction.accumulator, finish, origin)
    return builder.in_memory(place, tuple(result.stride()), origin)


def _row_major_view(builder: ProgramBuilder, tensor: LazyTensor) -> View:
    view = builder.realise(tensor)
    if view.stride != contiguous_strides(view.shape):
        builder.realise_row_major(tensor)
        view = builder.realise(tensor)
    return View(view.buffer, (tensor.numel,), (1,), view.offset)
