"""Random numbers in loop bodies: what ``ir.counter_random`` defines, from two scalar operations.

Of a seed and of the element's position in the result, ``random_bits`` makes 64 bits and ``random_word`` 32, two words
in the time of one block of bits where a kernel can; the rest is arithmetic on them. An element's number does not depend
on the kernel in which it is computed, nor on how that kernel walks its axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.counter_random import INTEGERS, NORMAL, UNIFORM, UNIFORM_BITS
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import pointwise
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Affine, Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor

# Ten rounds of a handful of operations: dearer than reading a number, much cheaper than another kernel.
_BITS_OPERATIONS = 30


def _bits(emitter: Emitter, seeds: LazyTensor, slot: int, position: int) -> int:
    seed = emitter.element(seeds, (Affine(slot), Affine()))
    return emitter.apply("random_bits", (seed, position), torch.int64)


def _word(emitter: Emitter, seeds: LazyTensor, slot: int, position: int) -> int:
    seed = emitter.element(seeds, (Affine(slot), Affine()))
    return emitter.apply("random_word", (seed, position), torch.int32)


def _position(emitter: Emitter, index: Index, shape: Sequence[int], factor: int = 1, shift: int = 0) -> int:
    """``factor`` times an element's position in a contiguous tensor, plus ``shift``."""
    whole = Affine(shift)
    gathered: list[int] = []
    for entry, stride in zip(index, contiguous_strides(tuple(shape)), strict=True):
        if isinstance(entry, Affine):
            whole = whole.plus(entry.scaled(stride * factor))
        else:
            stride_value = emitter.constant(stride * factor, torch.int64)
            gathered.append(emitter.apply("mul", (emitter.position(entry), stride_value), torch.int64))
    position = emitter.affine_value(whole)
    for term in gathered:
        position = emitter.apply("add", (position, term), torch.int64)
    return position


def _fraction(emitter: Emitter, bits: int, shift: int, places: int, dtype: torch.dtype) -> int:
    """``places`` of the bits of an integer, from ``shift`` on, as a number in [0, 1)."""
    kind = emitter.dtype_of(bits)
    bits = emitter.apply("shift_right", (bits, emitter.constant(shift, kind)), kind)
    bits = emitter.apply("bitwise_and", (bits, emitter.constant(2**places - 1, kind)), kind)
    scale = emitter.constant(2.0**-places, dtype)
    return emitter.apply("mul", (emitter.cast(bits, dtype), scale), dtype)


def _high_word(emitter: Emitter, bits: int) -> int:
    shifted = emitter.apply("shift_right", (bits, emitter.constant(32, torch.int64)), torch.int64)
    return emitter.cast(shifted, torch.int32)


def _uniform(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    seeds, slot = args[:2]
    places = UNIFORM_BITS[result.dtype]

    def emit(emitter: Emitter, index: Index) -> int:
        position = _position(emitter, index, result.shape)
        if result.dtype == torch.float64:
            return _fraction(emitter, _bits(emitter, seeds, slot, position), 11, 53, torch.float64)
        return _fraction(emitter, _word(emitter, seeds, slot, position), 32 - places, places, torch.float32)

    return pointwise(result, origin, emit, Cost(seeds.current_cost().reads, _BITS_OPERATIONS))


def _normal(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    seeds, slot = args[:2]
    wide = result.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32

    def fractions(emitter: Emitter, index: Index) -> tuple[int, int, float]:
        """Two numbers in [0, 1), and half the last place of the first."""
        if wide:
            positions = (_position(emitter, index, result.shape, 2, k) for k in (0, 1))
            first, second = (_bits(emitter, seeds, slot, position) for position in positions)
            return (
                _fraction(emitter, first, 11, 53, dtype),
                _fraction(emitter, second, 11, 53, dtype),
                2.0**-54,
            )
        bits = _bits(emitter, seeds, slot, _position(emitter, index, result.shape))
        first = _fraction(emitter, emitter.cast(bits, torch.int32), 1, 31, dtype)
        return first, _fraction(emitter, _high_word(emitter, bits), 8, 24, dtype), 2.0**-32

    def emit(emitter: Emitter, index: Index) -> int:
        first, second, half_a_place = fractions(emitter, index)

        def apply(operation: str, *values: int) -> int:
            return emitter.apply(operation, values, dtype)

        positive = apply("add", first, emitter.constant(half_a_place, dtype))
        radius = apply("sqrt", apply("mul", emitter.constant(-2, dtype), apply("log", positive)))
        angle = apply("mul", second, emitter.constant(2 * math.pi, dtype))
        return apply("mul", radius, apply("cos", angle))

    return pointwise(result, origin, emit, Cost(seeds.current_cost().reads, 2 * _BITS_OPERATIONS, 3))


def _integers(args: Sequence[Any], _: Mapping[str, Any], result: torch.Tensor, origin: str) -> LazyTensor:
    seeds, slot, _size, low, high = args[:5]

    def emit(emitter: Emitter, index: Index) -> int:
        def apply(operation: str, value: int, constant: int) -> int:
            return emitter.apply(operation, (value, emitter.constant(constant, torch.int64)), torch.int64)

        bits = _bits(emitter, seeds, slot, _position(emitter, index, result.shape))
        positive = apply("bitwise_and", bits, 2**63 - 1)
        return apply("add", apply("remainder", positive, high - low), low)

    return pointwise(result, origin, emit, Cost(seeds.current_cost().reads, _BITS_OPERATIONS))


RANDOM_RULES: Mapping[torch._ops.OpOverload, Callable[..., LazyTensor]] = {
    UNIFORM: _uniform,
    NORMAL: _normal,
    INTEGERS: _integers,
}
