"""Matrix products as generated kernels: which calls can be one, and which nest can be its epilogue.

A call of ``mm``, ``addmm`` or ``bmm`` becomes a ``ProductNest`` whose epilogue adds the bias and rounds as torch's
kernel does. A pointwise nest that reads the result element by element joins the epilogue: its body is appended, and the
result itself is not even written if nobody else reads it. The kernel then stands where the nest stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    ProductNest,
    ProductTile,
    Statement,
    Step,
    Store,
    View,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.nests.live_statements import renumbered
from gradsplit.compile_core.lowering.nests.order_axes import cut_axis, with_axes
from gradsplit.compile_core.lowering.tiling.tiling_triton import LARGEST_INT32

aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_BATCH = 65535
_LEAST_SIDE = 8  # of a matrix; what is thinner is no work for tensor cores
ANY_TILE = ProductTile(64, 64, 32, 3, 4)


@dataclass(frozen=True)
class ReplaceableSteps:
    """Steps of a program, by position, that one product could replace; it stands at the last of them."""

    positions: tuple[int, ...]
    product: ProductNest


def find_products(program: LoopProgram, precision: str, with_epilogues: bool) -> list[ReplaceableSteps]:
    """The products of a program that a generated kernel could compute; no step is in two of them."""
    found: list[ReplaceableSteps] = []
    for position, step in enumerate(program.steps):
        product = _as_product(step, position, program, precision) if isinstance(step, ExternCall) else None
        if product is None:
            continue
        reader = _sole_next(program, position, product) if with_epilogues else None
        joined = None if reader is None else _joined(product, program, reader)
        claimed = {other for candidate in found for other in candidate.positions}
        if joined is not None and reader is not None and reader not in claimed:
            found.append(ReplaceableSteps((position, reader), joined))
        else:
            found.append(ReplaceableSteps((position,), product))
    return found


def _as_product(step: ExternCall, position: int, program: LoopProgram, precision: str) -> ProductNest | None:
    bias: View | None = None
    alpha, beta = step.keywords.get("alpha", 1), step.keywords.get("beta", 1)
    if step.target is aten.mm.out or step.target is aten.bmm.out:
        left, right = step.arguments
    elif step.target is aten.addmm.out:
        bias, left, right = step.arguments
        bias = None if beta == 0 else bias
    else:
        return None
    out = step.out["out"]
    views = [left, right, out, *([bias] if bias is not None else [])]
    specs = [program.buffers[view.buffer] for view in views]
    dtype = specs[0].dtype
    if dtype not in _DTYPES or any(spec.dtype != dtype or spec.device.type != "cuda" for spec in specs):
        return None
    if (
        min(*left.shape[-2:], right.shape[-1]) < _LEAST_SIDE
        or 0 in left.shape
        or out.buffer in (left.buffer, right.buffer)
    ):
        return None
    if max(map(_reach, views)) > LARGEST_INT32 or (len(left.shape) == 3 and left.shape[0] > _LARGEST_BATCH):
        return None
    # The product itself is the value of a load from a buffer of its own name.
    body: list[Statement] = [Load(Access(out.buffer, out.stride, out.offset), torch.float32)]
    if alpha != 1:
        body += [Constant(float(alpha), torch.float32), Apply("mul", (0, 1), torch.float32)]
    if bias is not None:
        value = len(body) - 1
        strides = (0,) * (len(out.shape) - len(bias.shape)) + tuple(
            0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride, strict=True)
        )
        body.append(Load(Access(bias.buffer, strides, bias.offset), torch.float32))
        if beta != 1:
            body += [Constant(float(beta), torch.float32)]
            body.append(Apply("mul", (len(body) - 2, len(body) - 1), torch.float32))
        body.append(Apply("add", (value, len(body) - 1), torch.float32))
    if dtype != torch.float32:
        body.append(Apply("round_to", (len(body) - 1,), torch.float32, dtype))
    body.append(Store(Access(out.buffer, out.stride, out.offset), len(body) - 1))
    epilogue = LoopNest(f"product_{position}", tuple(out.shape), 0, tuple(body), step.origins)
    axes = (len(out.shape) - 2, 1, 1)
    return ProductNest(epilogue.name, left, right, out.buffer, epilogue, axes, ANY_TILE, precision)


def _reach(view: View) -> int:
    return view.offset + sum(
        (size - 1) * abs(stride) for size, stride in zip(view.shape, view.stride, strict=True)
    )


def _sole_next(program: LoopProgram, position: int, product: ProductNest) -> int | None:
    """The first step that touches the product's result, if the product can be computed as late as that."""
    needed = reads(product)
    for number in range(position + 1, len(program.steps)):
        step = program.steps[number]
        if product.product in reads(step) | writes(step):
            return number if isinstance(step, LoopNest) and product.product not in writes(step) else None
        if writes(step) & needed:
            return None
    return None


def _joined(product: ProductNest, program: LoopProgram, reader: int) -> ProductNest | None:
    """The product with a nest as the rest of its epilogue; None where the nest does more than that."""
    nest = program.steps[reader]
    assert isinstance(nest, LoopNest)
    *batch, rows, columns = product.epilogue.extents
    split = _split_axes(_as_it_reads(nest, product.product), (prod(batch), rows, columns))
    if split is None or reads(product) & writes(nest):
        return None
    nest, axes = split
    own = product.epilogue.body
    result = own[-1]
    assert isinstance(result, Store)
    place = _walk_of(result.access, product.epilogue.extents, nest.extents, axes)
    body: list[Statement] = [
        replace(s, access=_walk_of(s.access, product.epilogue.extents, nest.extents, axes))
        if isinstance(s, Load)
        else s
        for s in own[:-1]
    ]
    value = len(body) - 1
    elsewhere = any(
        product.product in reads(step) | writes(step) for k, step in enumerate(program.steps) if k > reader
    )
    returned = {view.buffer for view in program.outputs if view is not None}
    if elsewhere or product.product in returned | set(program.destinations):
        body.append(Store(place, value))
    numbers: dict[int, int] = {}
    for n, statement in enumerate(nest.body):
        if isinstance(statement, Load) and statement.access.buffer == product.product:
            if statement.access != place or statement.mask is not None:
                return None
            numbers[n] = value
            continue
        numbers[n] = len(body)
        body.append(renumbered(statement, numbers))
    if not any(isinstance(s, Store) for s in body):
        return None
    origins = (*product.origins, *nest.origins)
    epilogue = LoopNest(f"{product.name}_{nest.name}"[:60], nest.extents, 0, tuple(body), origins)
    return replace(product, name=epilogue.name, epilogue=epilogue, axes=axes)


def _as_it_reads(nest: LoopNest, product: str) -> LoopNest:
    """The nest with its axes in the order in which it walks the product's memory."""
    strides = next(s.access.strides for s in nest.body if isinstance(s, Load) and s.access.buffer == product)
    kept = [axis for axis, extent in enumerate(nest.extents) if extent != 1]
    return nest if nest.reduced_axes else with_axes(nest, sorted(kept, key=lambda axis: -strides[axis]))


def _split_axes(nest: LoopNest, sizes: tuple[int, int, int]) -> tuple[LoopNest, tuple[int, int, int]] | None:
    """The nest with axes cut so that some of them make up each of these sizes, in order; how many for each."""
    if nest.reduced_axes or prod(nest.extents) != prod(sizes):
        return None
    counts = [0, 0, 0]
    extents = list(nest.extents)
    axis = len(extents) - 1
    for side in (2, 1, 0):
        left_over = sizes[side]
        while left_over > 1:
            if axis < 0:
                return None
            extent = extents[axis]
            if left_over % extent == 0:
                left_over //= extent
                counts[side] += 1
                axis -= 1
            elif extent % left_over == 0:
                nest = cut_axis(nest, axis, left_over)
                extents[axis : axis + 1] = [extent // left_over, left_over]
                counts[side] += 1
                left_over = 1
            else:
                return None
    return None if axis >= 0 else (nest, (counts[0], counts[1], counts[2]))


def _walk_of(
    access: Access, sides: Sequence[int], extents: Sequence[int], axes: tuple[int, int, int]
) -> Access:
    """An access over (batch,) rows and columns as one over the axes that make these up."""
    strides_of = (0, *access.strides) if len(sides) == 2 else access.strides
    strides: list[int] = []
    first = 0
    for side, count in enumerate(axes):
        own = extents[first : first + count]
        below = [prod(own[k + 1 :]) for k in range(count)]
        strides += [strides_of[side] * factor for factor in below]
        first += count
    return replace(access, strides=tuple(strides))


def with_products(program: LoopProgram, chosen: Sequence[ReplaceableSteps]) -> LoopProgram:
    """The program in which the chosen products stand for the steps that they replace."""
    dropped = {position for candidate in chosen for position in candidate.positions}
    standing = {candidate.positions[-1]: candidate.product for candidate in chosen}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if position in standing:
            steps.append(standing[position])
        elif position not in dropped:
            steps.append(step)
    return replace(program, steps=tuple(steps))
