"""Quotients of bfloat16s by a constant, as a dropout has them, as products in two parts that are the same to a bit.

A division takes a GPU some ten instructions, and a jump for what is near the ends of the range; compilers and assembler
take as much longer. ``x / c`` is ``fma(x, high, x * low)`` where ``high + low`` is the inverse of ``c`` to twice the
digits of a float32, unless the quotient is hardly beside the middle between two floats. Whether it is for any of the
few numbers that a bfloat16 can be is found out by trying them all, but for those below 1e-18: there ``x * low`` may be
below the least normal number, and the last bit another.
"""

from __future__ import annotations

from array import array
from fractions import Fraction
from functools import cache
from math import isfinite

# Bits of the numbers from 2^-60 to the largest. What holds for them holds for those below 0; 0, infinities and NaN need
# no more than that both parts have one sign.
_PATTERNS = range((127 - 60) << 7, 0x7F80)


@cache
def product_of_quotient(divisor: float) -> tuple[float, float] | None:
    """What a bfloat16 is multiplied by instead of being divided; ``None`` where that is not the same.

    Args:
        divisor: a float32.

    Returns:
        ``high`` and ``low``, float32s of one sign.
    """
    if not isfinite(divisor) or not 2.0**-60 < abs(divisor) < 2.0**60:
        return None
    inverse = 1 / Fraction(divisor)
    (high,) = _float32s([float(inverse)])
    if abs(Fraction(high)) > abs(inverse):
        high = _towards_zero(high)
    (low,) = _float32s([float(inverse - Fraction(high))])
    numbers = array("f")
    numbers.frombytes(array("I", [bits << 16 for bits in _PATTERNS]).tobytes())
    # Python's numbers hold these products and sums to the last bit, and a quotient well enough to be rounded once more.
    small = _float32s([x * low for x in numbers])
    products = _float32s([x * high + part for x, part in zip(numbers, small, strict=True)])
    quotients = _float32s([x / divisor for x in numbers])
    return (high, low) if low and products.tobytes() == quotients.tobytes() else None


def _float32s(numbers: list[float]) -> array[float]:
    return array("f", numbers)


def _towards_zero(number: float) -> float:
    """The next float32."""
    bits = array("I")
    bits.frombytes(array("f", [number]).tobytes())
    bits[0] -= 1
    found = array("f")
    found.frombytes(bits.tobytes())
    return found[0]
