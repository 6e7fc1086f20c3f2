"""The sides of a Triton tile: each a flat index over some axes, and how strides look along it.

Where a buffer (or a position) is walked as one along all axes of a side, its address is the flat index times a step:
no division to recover the axes, and Triton sees that neighbours are neighbours. Elsewhere it is a sum over the axes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Side:
    """One side of a tile.

    Attributes:
        name: of its flat index in the kernel.
        axes: the nest's axes that the index runs over, outermost first.
        extents: theirs.
        block: how many indices a tile has.
        has_whole_blocks: what is written is for blocks that do not reach beyond the side.
    """

    name: str
    axes: tuple[int, ...]
    extents: tuple[int, ...]
    block: int
    has_whole_blocks: bool = False

    @property
    def count(self) -> int:
        return prod(self.extents)

    @property
    def overhangs(self) -> bool:
        """Whether the last block reaches beyond the side."""
        return not self.has_whole_blocks and (self.count % self.block != 0 or self.count == 0)

    def step(self, strides: Sequence[int]) -> int | None:
        """What each step of the flat index adds to an address; ``None`` where steps differ."""
        if not self.axes:
            return 0
        step = strides[self.axes[-1]]
        expected = step
        for axis, extent in zip(reversed(self.axes), reversed(self.extents), strict=True):
            if strides[axis] != expected:
                return None
            expected *= extent
        return step

    def terms(self, strides: Sequence[int]) -> list[str]:
        """The summands of an address along this side."""
        step = self.step(strides)
        if step is not None:
            return _products([(self.name, step)])
        return _products([(f"i{axis}", strides[axis]) for axis in self.axes])

    def index_lines(self, needed: Set[int]) -> list[str]:
        """The mask, where the last block needs one, and the index along each of the ``needed`` axes."""
        lines = [f"{self.name}_inside = {self.name} < {self.count}"] if self.overhangs else []
        below = self.count
        for axis, extent in zip(self.axes, self.extents, strict=True):
            below //= max(1, extent)
            if axis in needed:
                index = self.name if below == 1 else f"{self.name} // {below}"
                lines.append(
                    f"i{axis} = {index}" if axis == self.axes[0] else f"i{axis} = ({index}) % {extent}"
                )
        return lines


def _products(factors: Sequence[tuple[str, int]]) -> list[str]:
    return [name if step == 1 else f"{name} * {step}" for name, step in factors if step]
