"""Random loop nests. Values stay near 1, and only loaded values are compared, so that rounding decides
nothing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from gradsplit.compile_core.ir.loops import Gather, Store
from tests.lowering.codegen_nests import BOOL, F32, F64, I64, Case, NestBuilder

EXTENTS = st.sampled_from([1, 2, 3, 5, 8, 17, 33, 70])
LOADED = st.sampled_from([F32, F32, F32, torch.bfloat16, torch.float16, F64, I64, torch.uint8, BOOL])
UNARY = st.sampled_from(["tanh", "sigmoid", "erf", "neg", "abs", "exp"])
BINARY = st.sampled_from(["add", "sub", "mul", "maximum", "minimum"])
REDUCTIONS = st.sampled_from(["sum", "max", "min", "argmax", "argmin", "any", "all"])


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """A nest of up to three axes, of which any number are reduced, with several rounds of reductions."""
    rank = draw(st.integers(1, 3))
    extents = tuple(draw(EXTENTS) for _ in range(rank))
    reduced = draw(st.integers(0, rank))
    b = NestBuilder(extents, reduced)
    floats: list[int] = []
    loads: list[int] = []
    for k in range(draw(st.integers(1, 3))):
        axes = draw(st.permutations(range(rank)))
        axes = tuple(axes[: draw(st.integers(1, rank))]) if k else tuple(axes)
        dtype = draw(LOADED)
        b.buffer(f"x{k}", tuple(extents[axis] for axis in axes), dtype)
        value = b.load(f"x{k}", axes)
        loads.append(value)
        if b.dtype(value) != F32:
            value = b.apply("cast", value, dtype=F32)
        floats.append(b.apply("tanh", value))
    if draw(st.booleans()):
        limit = b.constant(draw(st.integers(0, 3)), b.dtype(loads[0]))
        floats.append(b.apply("where", b.apply("gt", loads[0], limit), floats[0], floats[-1]))
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            floats.append(b.apply(draw(BINARY), draw(st.sampled_from(floats)), draw(st.sampled_from(floats))))
        else:
            squeezed = b.apply("tanh", draw(st.sampled_from(floats)))
            floats.append(b.apply(draw(UNARY), squeezed))
        if reduced and draw(st.booleans()):
            floats.append(_reduction(draw, b, floats, loads))
    if draw(st.booleans()):
        _addition(draw, b, floats)
    everywhere = tuple(range(rank))
    b.buffer("y", extents, draw(st.sampled_from([F32, F32, torch.bfloat16, F64])))
    b.store("y", everywhere, floats[-1])
    return b.nest("random"), b.buffers


def _addition(draw: st.DrawFn, b: NestBuilder, floats: list[int]) -> None:
    """Adds a value at indices that any of the axes have, to elements that lie along the others."""
    rank = len(b.extents)
    indexed = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    kept = [axis for axis in range(rank) if axis not in indexed]
    b.buffer("index", tuple(b.extents[axis] for axis in indexed), I64)
    b.buffer("sums", (9, *(b.extents[axis] for axis in kept)), draw(st.sampled_from([F32, F32, F64])))
    index = Gather(b.load("index", tuple(indexed)), b.buffers["sums"].stride[0], 9)
    place = b.access("sums", (None, *kept), gathers=(index,))
    b.add(Store(place, draw(st.sampled_from(floats)), None, "sum"))


def _reduction(draw: st.DrawFn, b: NestBuilder, floats: list[int], loads: list[int]) -> int:
    """Adds a reduction, stores it, and returns a float of moderate size that depends on it."""
    operation = draw(REDUCTIONS)
    parallel = tuple(range(len(b.extents) - b.reduced_axes))
    shape = tuple(b.extents[axis] for axis in parallel)
    if operation.startswith("arg") and (b.reduced_axes != 1 or b.dtype(loads[0]) == BOOL):
        operation = "max"
    if operation.startswith("arg"):
        value = b.reduce(operation, loads[0], I64)
    elif operation in ("any", "all"):
        value = b.reduce(operation, b.apply("gt", loads[0], b.constant(1, b.dtype(loads[0]))), BOOL)
    else:
        value = b.reduce(operation, draw(st.sampled_from(floats)))
    name = f"reduced{len(b.body)}"
    b.buffer(name, shape, b.dtype(value))
    b.store(name, parallel, value)
    as_float = value if b.dtype(value) == F32 else b.apply("cast", value, dtype=F32)
    return b.apply("mul", as_float, b.constant(0.01))
