"""Where in a tensor a point of the iteration space reads: one entry per dim.

An entry is ``Affine`` in the loop axes or ``Indirect`` through an integer value of the body (a gather).
Reshapes need division with remainder of an affine entry. It has an exact answer where the loop axes are cut
finely enough; where one axis straddles the divisor, ``AxisSplitError`` asks the caller to cut this axis and
start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Affine:
    """``offset + sum(coefficient * axis)``; terms sorted by axis, coefficients nonzero."""

    offset: int = 0
    terms: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def axis(axis: int, coefficient: int = 1) -> Affine:
        return Affine(0, ((axis, coefficient),))

    def plus(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for axis, coefficient in other.terms:
            terms[axis] = terms.get(axis, 0) + coefficient
        kept = tuple(sorted((axis, coefficient) for axis, coefficient in terms.items() if coefficient))
        return Affine(self.offset + other.offset, kept)

    def scaled(self, factor: int, shift: int = 0) -> Affine:
        """``self * factor + shift``."""
        terms = tuple((axis, coefficient * factor) for axis, coefficient in self.terms) if factor else ()
        return Affine(self.offset * factor + shift, terms)

    def bounds(self, extents: Sequence[int]) -> tuple[int, int]:
        """Least and greatest value over the iteration space."""
        low = high = self.offset
        for axis, coefficient in self.terms:
            reach = coefficient * (extents[axis] - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high


@dataclass(frozen=True)
class Indirect:
    """The body's integer value ``value``; see ``Gather``."""

    value: int
    size: int
    wraps: bool = True


Entry = Affine | Indirect
Index = tuple[Entry, ...]


class AxisSplitError(Exception):
    """Cut loop axis ``axis`` so that its inner part has extent ``inner``."""

    def __init__(self, axis: int, inner: int) -> None:
        super().__init__(f"axis {axis} must be cut at {inner}")
        self.axis = axis
        self.inner = inner


class NotAffineError(Exception):
    """The wanted index is no affine function of any refinement of the loop axes."""


def divide(entry: Affine, divisor: int, extents: Sequence[int]) -> tuple[Affine, Affine]:
    """Quotient and remainder of a nonnegative entry, both affine.

    Raises:
        AxisSplitError: a finer iteration space makes it possible.
        NotAffineError: nothing does.
    """
    quotient: list[tuple[int, int]] = []
    remainder: list[tuple[int, int]] = []
    for axis, coefficient in entry.terms:
        if coefficient % divisor == 0:
            quotient.append((axis, coefficient // divisor))
        else:
            remainder.append((axis, coefficient))
    rest = Affine(entry.offset % divisor, tuple(remainder))
    low, high = rest.bounds(extents)
    if low >= 0 and high < divisor:
        return Affine(entry.offset // divisor, tuple(quotient)), rest
    for axis, coefficient in remainder:
        if coefficient > 0 and divisor % coefficient == 0:
            inner = divisor // coefficient
            if inner < extents[axis] and extents[axis] % inner == 0:
                raise AxisSplitError(axis, inner)
    raise NotAffineError


def regroup(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The finest pairing of runs of dims of two shapes of equal, nonzero numel such that paired runs have
    equal numel.

    Size-1 dims join a neighbouring run or stand alone against an empty run.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left = right = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new) and left != 1:
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
            if (left < right and i >= len(old)) or (right < left and j >= len(new)):
                raise ValueError(f"shapes {tuple(old)} and {tuple(new)} differ in numel")
        if start_i == i and start_j == j:
            j += 1  # a size-1 dim of the new shape alone
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def reshape_index(
    index: Index, shape: Sequence[int], base_shape: Sequence[int], extents: Sequence[int]
) -> Index:
    """Turns an index into a tensor of ``shape`` into the index of the same element in ``base_shape``."""
    result: list[Entry] = [Affine()] * len(base_shape)
    for base_dims, dims in regroup(base_shape, shape):
        wide_base = [d for d in base_dims if base_shape[d] != 1]
        wide = [d for d in dims if shape[d] != 1]
        if len(wide_base) == 1 and len(wide) == 1:
            result[wide_base[0]] = index[wide[0]]
            continue
        flat = Affine()
        for d in dims:
            entry = index[d]
            if isinstance(entry, Indirect):
                raise NotAffineError
            flat = flat.plus(entry.scaled(prod(shape[d + 1 : dims.stop])))
        for position, d in enumerate(reversed(wide_base)):
            if position == len(wide_base) - 1:
                result[d] = flat
            else:
                flat, result[d] = divide(flat, base_shape[d], extents)
    return tuple(result)
