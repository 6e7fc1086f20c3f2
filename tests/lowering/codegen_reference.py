"""The meaning of a loop nest, the slow way: every statement as one torch operation over the whole iteration
space."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from compile_core.ir.counter_random import random_bits, random_word
from compile_core.ir.loops import Access, Apply, Constant, Load, LoopNest, Position, Reduce, Store
from compile_core.ir.tensor_spec import TensorSpec

OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sub": torch.sub,
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "div": torch.true_divide,
    "random_bits": random_bits,
    "random_word": random_word,
}


def evaluate(
    nest: LoopNest, buffers: Mapping[str, TensorSpec], storages: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Flat storages of every buffer after the nest, computed from those before it."""
    state = {name: storage.clone() for name, storage in storages.items()}
    rank = len(nest.extents)
    values: list[torch.Tensor] = []

    def axis_index(axis: int) -> torch.Tensor:
        shape = [1] * rank
        shape[axis] = nest.extents[axis]
        return torch.arange(nest.extents[axis]).reshape(shape)

    def address(access: Access, active: torch.Tensor | None) -> torch.Tensor:
        index = torch.full((1,) * rank, access.offset)
        for axis, stride in enumerate(access.strides):
            if stride:
                index = index + axis_index(axis) * stride
        for gather in access.gathers:
            position = values[gather.value].to(torch.int64)
            position = torch.where(position < 0, position + gather.size, position)
            bad = (position < 0) | (position >= gather.size)
            if (bad if active is None else bad & active).any():
                raise IndexError("gather")
            index = index + torch.where(bad, 0, position) * gather.stride
        return index if active is None else torch.where(active, index, 0)

    for statement in nest.body:
        match statement:
            case Load(access=access, dtype=dtype, mask=mask, other=other):
                active = None if mask is None else values[mask]
                flat = state[access.buffer]
                index = address(access, active)
                if active is not None:
                    index, active = torch.broadcast_tensors(index, active)
                read = flat[index] if flat.numel() else torch.zeros(index.shape, dtype=flat.dtype)
                value = read.to(dtype)
                values.append(
                    value if active is None else torch.where(active, value, torch.tensor(other, dtype=dtype))
                )
            case Constant(value=value, dtype=dtype):
                values.append(torch.full((1,) * rank, value, dtype=dtype))
            case Position(strides=strides, offset=offset):
                moves = (axis_index(axis) * stride for axis, stride in enumerate(strides) if stride)
                values.append(sum(moves, torch.full((1,) * rank, offset)))
            case Apply():
                values.append(_apply(statement, [values[a] for a in statement.arguments]))
            case Reduce():
                values.append(_reduce(nest, statement, values[statement.argument]))
            case Store(access=access, value=value, mask=mask):
                active = None if mask is None else values[mask]
                index = address(access, active)
                stored = values[value].to(state[access.buffer].dtype)
                if active is None:
                    index, stored = torch.broadcast_tensors(index, stored)
                    state[access.buffer][index.reshape(-1)] = stored.reshape(-1)
                else:
                    index, stored, active = torch.broadcast_tensors(index, stored, active)
                    state[access.buffer][index[active]] = stored[active]
                values.append(torch.zeros((1,) * rank))
    return state


def _apply(statement: Apply, arguments: list[torch.Tensor]) -> torch.Tensor:
    if statement.operation == "cast":
        return arguments[0].to(statement.dtype)
    if statement.operation == "round_to":
        assert statement.parameter is not None
        return arguments[0].to(statement.parameter).to(statement.dtype)
    function = OPERATIONS.get(statement.operation) or getattr(torch, statement.operation)
    return function(*arguments).to(statement.dtype)


def _reduce(nest: LoopNest, statement: Reduce, argument: torch.Tensor) -> torch.Tensor:
    parallel = len(nest.extents) - nest.reduced_axes
    axes = list(range(parallel, len(nest.extents)))
    if not axes:
        return argument.to(statement.dtype)
    shape = [*argument.shape[:parallel], *nest.extents[parallel:]]
    full = argument.expand(shape)
    match statement.operation:
        case "sum":
            wide = torch.float64 if statement.dtype.is_floating_point else statement.dtype
            return full.to(wide).sum(axes, keepdim=True).to(statement.dtype)
        case "prod":
            value = full.to(torch.float64 if statement.dtype.is_floating_point else statement.dtype)
            for axis in axes:
                value = value.prod(axis, keepdim=True)
            return value.to(statement.dtype)
        case "max":
            return full.amax(axes, keepdim=True).to(statement.dtype)
        case "min":
            return full.amin(axes, keepdim=True).to(statement.dtype)
        case "any" | "all":
            return getattr(torch, statement.operation)(full.bool(), dim=axes, keepdim=True)
        case _:
            (axis,) = axes
            return getattr(torch, statement.operation)(full, dim=axis, keepdim=True)
