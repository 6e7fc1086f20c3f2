"""Nests for pooling: a body that writes out a window's loads, and a gradient of maxima that gathers.

An element of that gradient lies in windows that depend on its position modulo the step of the windows. So the body of
the gradient's nest is for a block of positions, one of each remainder: which windows each of them lies in, and at which
place of them, are then constants, windows are loaded once for all, and no index needs a division.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.pooling import GRADIENT, MAX_POOL, WINDOW_SUMS
from gradsplit.compile_core.ir.tensor_spec import compute_dtype
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import (
    ProgramBuilder,
    static_spec,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Affine, Entry, Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Emitter, LazyTensor

POOLING = frozenset({MAX_POOL, GRADIENT, WINDOW_SUMS})

# What is computed anew for each window that reads it may take so many operations in all; of sums, which take little.
_MOST_OPERATIONS, _MOST_OF_SUMS = 150, 30


def lower_pooling(
    builder: ProgramBuilder, node: torch.fx.Node, args: Sequence[Any], used: Sequence[Any], place: View | None
) -> LazyTensor | list[LazyTensor | None]:
    """Emits the nest of a node; ``used`` says which of its results anything reads."""
    if node.target is GRADIENT:
        return _gradient(builder, node, args, place)
    if node.target is WINDOW_SUMS:
        return _sums(builder, node, args, place)
    return _pool(builder, node, args, used)


def _pool(
    builder: ProgramBuilder, node: torch.fx.Node, args: Sequence[Any], used: Sequence[Any]
) -> list[LazyTensor | None]:
    x, kernel, stride, padding, _ = args
    _settle(builder, x, kernel[0] * kernel[1])
    views = [
        builder.new_buffer(f"{node.name}_{position}", static_spec(fake, node.name))
        if position in used
        else None
        for position, fake in enumerate(node.meta["val"])
    ]
    dtype = compute_dtype(x.dtype)

    def body(emitter: Emitter, index: Index) -> None:
        largest, place = None, _first_inside(emitter, index[-2:], kernel, stride, padding)
        for row, column in itertools.product(range(kernel[0]), range(kernel[1])):
            value, inside = _tap(emitter, x, index, (row, column), stride, padding)
            if inside is not None:
                lowest = emitter.constant(-float("inf"), dtype)
                value = emitter.apply("where", (inside, value, lowest), dtype)
            if largest is None:
                largest = value
                continue
            wins = emitter.apply("gt", (value, largest), torch.bool)
            wins = emitter.apply(
                "logical_or", (wins, emitter.apply("isnan", (value,), torch.bool)), torch.bool
            )
            here = emitter.constant(row * kernel[1] + column, torch.int32)
            place = emitter.apply("where", (wins, here, place), torch.int32)
            largest = emitter.apply("maximum", (largest, value), dtype)
        for view, value in zip(views, (largest, place), strict=True):
            if view is not None and value is not None:
                emitter.store(emitter.access(view, index), value)

    if x.numel:
        builder.emit_nest(tuple(node.meta["val"][0].shape), (), body, node.name)
    strides = [tuple(fake.stride()) for fake in node.meta["val"]]
    return [
        None if view is None else builder.in_memory(view, stride, node.name)
        for view, stride in zip(views, strides, strict=True)
    ]


def _sums(
    builder: ProgramBuilder, node: torch.fx.Node, args: Sequence[Any], place: View | None
) -> LazyTensor:
    x, kernel, stride, padding, *weights = args
    _settle(builder, x, kernel[0] * kernel[1], _MOST_OF_SUMS)
    fake = node.meta["val"]
    result = place or builder.new_like(node.name, fake)
    dtype = compute_dtype(x.dtype)

    def body(emitter: Emitter, index: Index) -> None:
        total = emitter.constant(0.0, dtype)
        for tap in itertools.product(range(kernel[0]), range(kernel[1])):
            value, inside = _tap(emitter, x, index, tap, stride, padding)
            if inside is not None:
                value = emitter.apply("where", (inside, value, emitter.constant(0.0, dtype)), dtype)
            for weight in weights:
                factor = emitter.element(weight, (index[1], *map(Affine, tap)))
                value = emitter.apply("mul", (value, factor), dtype)
            total = emitter.apply("add", (total, value), dtype)
        emitter.store(emitter.access(result, index), total)

    if x.numel:
        builder.emit_nest(tuple(fake.shape), (), body, node.name)
    return builder.in_memory(result, tuple(fake.stride()), node.name)


def _tap(
    emitter: Emitter,
    x: LazyTensor,
    index: Index,
    tap: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[int, int | None]:
    """The element at a place of a window, and whether it lies in the plane; ``None`` where it always does."""
    sides = zip(index[-2:], stride, padding, tap, x.shape[-2:], strict=True)
    entries = [emitter.shifted(entry, step, at - pad, size) for entry, step, pad, at, size in sides]
    inside = _inside(emitter, entries, x.shape[-2:])
    return emitter.round_to(_element(emitter, x, (*index[:-2], *entries), inside), x.dtype), inside


def _gradient(
    builder: ProgramBuilder, node: torch.fx.Node, args: Sequence[Any], place: View | None
) -> LazyTensor:
    grad, places, kernel, stride, padding, size = args
    fake = node.meta["val"]
    windows = [-(-kernel[dim] // stride[dim]) for dim in (0, 1)]
    _settle(builder, grad, windows[0] * windows[1])
    _settle(builder, places, windows[0] * windows[1])
    result = place or builder.new_like(node.name, fake)
    dtype = compute_dtype(grad.dtype)

    def gathered(emitter: Emitter, index: Index, phase: tuple[int, ...]) -> int:
        """What arrives at the positions that leave the remainders ``phase``."""
        total = emitter.constant(0.0, dtype)
        sides = [
            [
                (
                    emitter.shifted(index[dim - 2], 1, (phase[dim] + padding[dim]) // stride[dim] - back, 0),
                    tap,
                )
                for back, tap in enumerate(
                    range((phase[dim] + padding[dim]) % stride[dim], kernel[dim], stride[dim])
                )
            ]
            for dim in (0, 1)
        ]
        for (row, row_tap), (column, column_tap) in itertools.product(*sides):
            inside = _inside(emitter, (row, column), places.shape[-2:])
            window = (*index[:-2], row, column)
            tap = emitter.constant(row_tap * kernel[1] + column_tap, torch.int32)
            chosen = emitter.cast(_element(emitter, places, window, inside), torch.int32)
            hit = emitter.apply("eq", (chosen, tap), torch.bool)
            if inside is not None:
                hit = emitter.apply("logical_and", (hit, inside), torch.bool)
            arriving = emitter.round_to(_element(emitter, grad, window, inside), grad.dtype)
            arriving = emitter.apply("where", (hit, arriving, emitter.constant(0.0, dtype)), dtype)
            total = emitter.apply("add", (total, arriving), dtype)
        return total

    def body(emitter: Emitter, index: Index) -> None:
        for phase in itertools.product(range(stride[0]), range(stride[1])):
            entries = [emitter.shifted(index[dim - 2], stride[dim], phase[dim], size[dim]) for dim in (0, 1)]
            inside = _inside(emitter, entries, size)
            target = emitter.access(result, (*index[:-2], *entries))
            emitter.store(target, gathered(emitter, index, phase), inside)

    blocks = [-(-size[dim] // stride[dim]) for dim in (0, 1)]
    if fake.numel():
        builder.emit_nest((*fake.shape[:-2], *blocks), (), body, node.name)
    return builder.in_memory(result, tuple(fake.stride()), node.name)


def _settle(builder: ProgramBuilder, tensor: LazyTensor, readers: int, most: int = _MOST_OPERATIONS) -> None:
    """Gives a tensor memory that so many windows would each compute."""
    cost = tensor.current_cost()
    if cost.transcendental or cost.operations * readers > most:
        builder.realise(tensor)


def _element(emitter: Emitter, tensor: LazyTensor, index: Index, inside: int | None) -> int:
    """An element where ``inside`` is true, anything elsewhere."""
    if inside is None:
        return emitter.element(tensor, index)
    with emitter.masked(inside):
        return emitter.element(tensor, index)


def _inside(emitter: Emitter, entries: Sequence[Entry], sizes: Sequence[int]) -> int | None:
    """Whether all entries are in the range of their dims; ``None`` where they always are."""
    inside: int | None = None
    for entry, size in zip(entries, sizes, strict=True):
        assert isinstance(entry, Affine)
        low, high = entry.bounds(emitter.extents)
        for fails, operation, limit in ((low < 0, "ge", 0), (high >= size, "lt", size)):
            if fails:
                sides = (emitter.affine_value(entry), emitter.constant(limit, torch.int64))
                holds = emitter.apply(operation, sides, torch.bool)
                inside = (
                    holds if inside is None else emitter.apply("logical_and", (inside, holds), torch.bool)
                )
    return inside


def _first_inside(
    emitter: Emitter,
    starts: Sequence[Entry],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> int:
    """The first place of a window that lies in the plane: where its maximum is if all values are -inf."""
    first = emitter.constant(0, torch.int64)
    for entry, step, pad, width in zip(starts, stride, padding, (kernel[1], 1), strict=True):
        if pad:
            assert isinstance(entry, Affine)
            outside = emitter.affine_value(entry.scaled(-step, pad))
            outside = emitter.apply("maximum", (outside, emitter.constant(0, torch.int64)), torch.int64)
            outside = emitter.apply("mul", (outside, emitter.constant(width, torch.int64)), torch.int64)
            first = emitter.apply("add", (first, outside), torch.int64)
    return emitter.cast(first, torch.int32)
