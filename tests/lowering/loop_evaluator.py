"""What nests and programs of nests mean, slowly: each statement is one torch operation on the whole iteration space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from gradsplit.compile_core.ir.counter_random import random_bits, random_word
from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    BandNest,
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    NestBatch,
    Position,
    Reduce,
    Step,
    Store,
    View,
    varied_axes,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

Buffers = dict[str, torch.Tensor]
Noise = Callable[[torch.Tensor], torch.Tensor]


def run_step(step: Step, buffers: Buffers, program: LoopProgram, noisy: Noise | None = None) -> None:
    """Runs one step on buffers, allocating those that it needs and that do not exist; see ``run_nest``."""
    if isinstance(step, (LoopNest, NestBatch)):
        # What is read and was not written has no elements.
        for name in reads(step) | writes(step):
            allocate(buffers, program, name)
        # A batch's members run in any order.
        for nest in reversed(step.members) if isinstance(step, NestBatch) else [step]:
            run_nest(nest, buffers, noisy)
    elif isinstance(step, BandNest):
        _run_bands(step, buffers, program, noisy)
    else:
        assert isinstance(step, ExternCall)
        _run_call(step, buffers, program)


def evaluate(
    program: LoopProgram,
    inputs: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor] = (),
    run: Callable[[Step, Buffers, LoopProgram], None] = run_step,
) -> list[torch.Tensor | None]:
    """The program's outputs, each step done by ``run``. Temporaries start as garbage (NaN or large numbers)."""
    buffers: Buffers = {}
    for name, tensor in zip(program.inputs, inputs, strict=True):
        assert TensorSpec.of(tensor) == program.buffers[name], name
        buffers[name] = tensor
    buffers.update(zip(program.destinations, destinations, strict=True))
    buffers.update(program.constants)
    for step in program.steps:
        run(step, buffers, program)
    for name in {view.buffer for view in program.outputs if view is not None}:
        allocate(buffers, program, name)  # an empty tensor needs no step
    return [None if view is None else _strided(buffers[view.buffer], view) for view in program.outputs]


def _run_bands(step: BandNest, buffers: Buffers, program: LoopProgram, noisy: Noise | None) -> None:
    """Stores what is to be summed for all rows, and adds up the bands."""
    rows, columns = step.rows.extents
    stores = tuple(Store(Access(f"{name} of all rows", (columns, 1)), value) for value, name in step.sums)
    for store in stores:
        buffers[store.access.buffer] = torch.zeros(rows, columns)
    for name in writes(step):
        allocate(buffers, program, name)
    run_nest(replace(step.rows, body=(*step.rows.body, *stores)), buffers, noisy)
    for store, (_, name) in zip(stores, step.sums, strict=True):
        parts = buffers.pop(store.access.buffer).reshape(-1, step.band, columns)
        buffers[name].copy_(parts.sum(1))


def allocate(buffers: Buffers, program: LoopProgram, name: str) -> None:
    """Makes a temporary, full of garbage, if it does not exist."""
    if name not in buffers:
        spec = program.buffers[name]
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        garbage = float("nan") if spec.dtype.is_floating_point else 1 if spec.dtype == torch.bool else 113
        torch.as_strided(tensor, (_span(spec),), (1,)).fill_(garbage)
        buffers[name] = tensor


def _span(spec: TensorSpec) -> int:
    if not spec.numel:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))


def _strided(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(tensor, view.shape, view.stride, view.offset + tensor.storage_offset())


def _wide_product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, out: torch.Tensor
) -> torch.Tensor:
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


# What torch has for GPUs alone.
_ON_CPUS: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.mm.dtype_out: _wide_product}


def _run_call(call: ExternCall, buffers: Buffers, program: LoopProgram) -> None:
    def place(argument: Any) -> Any:
        if not isinstance(argument, View):
            return argument
        allocate(buffers, program, argument.buffer)
        return _strided(buffers[argument.buffer], argument)

    def is_view(argument: Any) -> bool:
        return isinstance(argument, View)

    tree_map = torch.utils._pytree.tree_map
    arguments, keywords, out = tree_map(
        place, (list(call.arguments), dict(call.keywords), dict(call.out)), is_leaf=is_view
    )
    result = _ON_CPUS.get(call.target, call.target)(*arguments, **keywords, **out)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for name, value in zip(call.outputs, results, strict=True):
        if name is not None:
            spec = program.buffers[name]
            assert (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype), name
            steps = zip(spec.shape, value.stride(), spec.stride, strict=True)
            assert all(size == 1 or mine == wanted for size, mine, wanted in steps) or not spec.numel, name
            buffers[name] = value


def evaluate_nest(nest: LoopNest, storages: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flat storages of every buffer after the nest, computed from those before it."""
    state = {name: storage.clone() for name, storage in storages.items()}
    run_nest(nest, state)
    return state


def run_nest(nest: LoopNest, buffers: Buffers, noisy: Noise | None = None) -> None:
    """Executes one nest on buffers that exist.

    Args:
        noisy: what becomes of each value that is computed, and of what is reduced: rounding, for who wants to know what
            it does.

    Raises:
        IndexError: a gathered index is out of range where it is used.
    """
    rank = len(nest.extents)
    if 0 in nest.extents[: rank - nest.reduced_axes]:
        return
    device = next(iter(buffers.values())).device
    grid = [
        torch.arange(extent, device=device).reshape([-1 if a == axis else 1 for a in range(rank)])
        for axis, extent in enumerate(nest.extents)
    ]
    reduced = list(range(rank - nest.reduced_axes, rank))
    values: list[torch.Tensor] = []

    def address(access: Access, mask: torch.Tensor | None) -> torch.Tensor:
        """The elements that an access touches; 0 where the mask is false."""
        total = torch.full([1] * rank, access.offset, device=device)
        for axis, stride in enumerate(access.strides):
            if stride:
                total = total + grid[axis] * stride
        for gather in access.gathers:
            index = values[gather.value].long()
            bad = (index < (-gather.size if gather.wraps else 0)) | (index >= gather.size)
            if (bad if mask is None else bad & mask).any():
                raise IndexError(f"gather from {access.buffer}")
            index = torch.where(index < 0, index + gather.size, index)
            total = total + torch.where(bad, 0, index) * gather.stride
        return total if mask is None else torch.where(mask, total, 0)

    varied = varied_axes(nest)
    for number, statement in enumerate(nest.body):
        value = torch.zeros([1] * rank)
        if isinstance(statement, Constant):
            value = torch.full([1] * rank, statement.value, dtype=statement.dtype, device=device)
        elif isinstance(statement, Position):
            value = address(Access("", statement.strides, statement.offset), None)
        elif isinstance(statement, Load):
            mask = None if statement.mask is None else values[statement.mask]
            where = address(statement.access, mask)
            memory = flat(buffers[statement.access.buffer])
            if mask is not None and not mask.any():
                memory = memory.new_zeros(1)  # nothing is read, perhaps because there is nothing
            assert bool((where >= 0).all() and (where < len(memory)).all()), statement
            value = memory[where].to(statement.dtype)
            if mask is not None:
                value = torch.where(mask, value, torch.tensor(statement.other, dtype=statement.dtype))
        elif isinstance(statement, Apply):
            value = _apply(statement, [values[argument] for argument in statement.arguments])
        elif isinstance(statement, Reduce):
            argument = values[statement.argument]
            shape = [nest.extents[axis] if axis in reduced else argument.shape[axis] for axis in range(rank)]
            argument = argument if noisy is None else noisy(argument)
            value = _reduce(statement, argument.expand(shape), reduced)
        else:
            mask = None if statement.mask is None else values[statement.mask]
            where = address(statement.access, mask)
            buffer = buffers[statement.access.buffer]
            if statement.reduction is None:
                _store(where, values[statement.value], mask, buffer)
            else:
                points = torch.zeros([nest.extents[a] if a in varied[number] else 1 for a in range(rank)])
                _combine(where, values[statement.value], mask, buffer, statement.reduction, points)
        if noisy is not None and isinstance(statement, Apply | Reduce):
            value = noisy(value)
        values.append(value)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, from its first element to its last."""
    return torch.as_strided(tensor, (_span(TensorSpec.of(tensor)),), (1,))


def _store(where: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, buffer: torch.Tensor) -> None:
    written = torch.ones_like(where, dtype=torch.bool) if mask is None else mask
    where, value, written = torch.broadcast_tensors(where, value.to(buffer.dtype), written)
    assert where[written].unique().numel() == written.sum(), "two points store to one element"
    flat(buffer)[where[written]] = value[written]


def _combine(
    where: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    buffer: torch.Tensor,
    reduction: str,
    points: torch.Tensor,
) -> None:
    """At each of ``points`` combines a value with what is where it goes."""
    written = torch.ones_like(where, dtype=torch.bool) if mask is None else mask
    where, value, written, points = torch.broadcast_tensors(where, value.to(buffer.dtype), written, points)
    assert where.shape == points.shape
    name = {"sum": "sum", "max": "amax", "min": "amin"}[reduction]
    flat(buffer).scatter_reduce_(0, where[written], value[written], name)


def _reduce(statement: Reduce, argument: torch.Tensor, dims: list[int]) -> torch.Tensor:
    operation = statement.operation
    if operation == "deviations":
        wide = argument.to(torch.float64)
        apart = wide - wide.mean(dims, keepdim=True)
        return (apart * apart).sum(dims, keepdim=True).to(statement.dtype)
    if operation in ("argmax", "argmin"):
        assert len(dims) == 1
        ordered = argument.to(torch.uint8) if argument.dtype == torch.bool else argument
        return getattr(torch, operation)(ordered, dims[0], keepdim=True)
    if not dims or operation in ("max", "min"):
        if not dims:
            return argument.to(statement.dtype)
        return {"max": torch.amax, "min": torch.amin}[operation](argument, dims, keepdim=True)
    if operation == "prod":
        argument = argument.to(torch.float64 if statement.dtype.is_floating_point else statement.dtype)
        for dim in dims:
            argument = torch.prod(argument, dim, keepdim=True)
        return argument.to(statement.dtype)
    if operation in ("any", "all"):
        for dim in dims:
            argument = getattr(torch, operation)(argument, dim, keepdim=True)
        return argument
    wide = torch.float64 if statement.dtype.is_floating_point else statement.dtype
    return torch.sum(argument, dims, keepdim=True, dtype=wide).to(statement.dtype)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "random_bits": random_bits, "random_word": random_word,
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
}  # fmt: skip


def _apply(statement: Apply, arguments: list[torch.Tensor]) -> torch.Tensor:
    if statement.operation == "cast":
        return arguments[0].to(statement.dtype)
    if statement.operation == "round_to":
        return arguments[0].to(statement.parameter).to(statement.dtype)
    function = _FUNCTIONS.get(statement.operation) or getattr(torch, statement.operation)
    for argument in arguments[1:] if statement.operation == "where" else arguments:
        assert argument.dtype == arguments[-1].dtype, statement
    result = function(*arguments)
    assert result.dtype == statement.dtype, (statement, result.dtype)
    assert prod(result.shape) >= 0
    return result
