"""Random numbers that are functions of a seed and a position: operators of joint graphs, and what they mean.

Eager draws from a generator, whose state every draw moves. Here a program draws one seed for each of its random
operators, and an element of the operator's result is a function of that seed and of its position in the result. So the
numbers can be made in any kernel, in any order, and made again where they are needed once more.

The function is Philox 2x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the
lower half of the seed is its key, the upper half is mixed into the upper half of the counter, which is the position
otherwise. Generated kernels compute the same; what is written here, with torch's operators, is the definition that they
are tested against, and what runs where a number is needed outside of a kernel. Normal numbers may differ in their last
places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

MULTIPLIER, KEY_STEP, ROUNDS = 0xD256D193, 0x9E3779B9, 10

# A program's seeds lie so many numbers apart, of which the first counts: kernels get the addresses of single seeds, and
# are compiled for addresses that are multiples of 16.
SEED_STRIDE = 2

# The binary places of a uniform number, as many as numbers just below one have.
UNIFORM_BITS: Mapping[torch.dtype, int] = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}

_WORD = 0xFFFFFFFF
_LARGEST = 2**63 - 1


def random_bits(seed: Tensor, position: Tensor) -> Tensor:
    """64 random bits (int64) for each int64 position."""
    key, low = seed & _WORD, position & _WORD
    high = ((position >> 32) ^ (seed >> 32)) & _WORD
    for _ in range(ROUNDS):
        product = low * MULTIPLIER  # wraps, as it should
        low, high = ((product >> 32) & _WORD) ^ key ^ high, product & _WORD
        key = (key + KEY_STEP) & _WORD
    return (high << 32) | low


def random_word(seed: Tensor, position: Tensor) -> Tensor:
    """32 random bits (int32) for each int64 position: neighbours take the two halves of the same 64."""
    bits = random_bits(seed, position >> 1)
    return torch.where((position & 1) != 0, bits >> 32, bits).to(torch.int32)


def _seed(seeds: Tensor, slot: int) -> Tensor:
    return seeds[slot, 0]


def _positions(seeds: Tensor, size: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(size), device=seeds.device).reshape(size)


def _uniform(seeds: Tensor, slot: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    places = UNIFORM_BITS[dtype]
    draw, length = (random_bits, 64) if dtype == torch.float64 else (random_word, 32)
    bits = draw(_seed(seeds, slot), _positions(seeds, size))
    return ((bits >> (length - places)) & (2**places - 1)).to(dtype) * 2.0**-places


def _normal(seeds: Tensor, slot: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Box and Muller's transform; the radius is from a number in (0, 1]."""
    positions = _positions(seeds, size)
    if dtype == torch.float64:
        both = (random_bits(_seed(seeds, slot), 2 * positions + k) >> 11 & (2**53 - 1) for k in (0, 1))
        first, angle = (bits.double() * 2.0**-53 for bits in both)
        radius = first + 2.0**-54
    else:
        bits = random_bits(_seed(seeds, slot), positions)
        radius = ((bits & _WORD) >> 1).float() * 2.0**-31 + 2.0**-32
        angle = ((bits >> 40) & 0xFFFFFF).float() * 2.0**-24
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).to(dtype)


def _integers(
    seeds: Tensor, slot: int, size: Sequence[int], low: int, high: int, dtype: torch.dtype
) -> Tensor:
    bits = random_bits(_seed(seeds, slot), _positions(seeds, size)) & _LARGEST
    return (bits % (high - low) + low).to(dtype)


def integers_in_range(low: int, high: int) -> bool:
    """Whether ``integers`` can draw from ``[low, high)``."""
    return 0 < high - low <= _LARGEST


_library = torch.library.Library("gradsplit", "FRAGMENT")


def _define(name: str, range_arguments: str, function: Callable[..., Tensor]) -> torch._ops.OpOverload:
    _library.define(
        f"{name}(Tensor seeds, int slot, SymInt[] size, {range_arguments}ScalarType dtype) -> Tensor"
    )
    _library.impl(name, function, "CompositeExplicitAutograd")

    def fake(seeds: Tensor, slot: int, size: Sequence[int], *rest: object, dtype: torch.dtype) -> Tensor:
        return seeds.new_empty(size, dtype=dtype)

    torch.library.register_fake(f"gradsplit::{name}", fake, lib=_library)
    return getattr(torch.ops.gradsplit, name).default


# Each takes the program's seeds (int64, a row of ``SEED_STRIDE`` each), which of them is its own, and the size of its
# result, which is contiguous.
UNIFORM = _define("random_uniform", "*, ", _uniform)
NORMAL = _define("random_normal", "*, ", _normal)
INTEGERS = _define("random_integers", "int low, int high, *, ", _integers)

COUNTER_OPERATORS = frozenset({UNIFORM, NORMAL, INTEGERS})
