"""The largest element of a row and the sum of exponentials of differences from it, in one walk.

A softmax over a long row would walk it for its maximum and once more for the sum, which half of the time is in no cache
any longer. While the maximum is not known, exponentials are taken of differences from the largest element so far; when
a larger one comes, the sum so far is multiplied down (Milakov & Gimelshein, "Online normalizer calculation for
softmax", 2018). Here each thread has a maximum of its own for the neighbours that it loads together, so that nothing is
exchanged before the end and the exponentials are hardly more than those of two walks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsplit.compile_core.ir.loops import Apply, Reduce
from gradsplit.compile_core.lowering.nests.passes import NestAnalysis
from gradsplit.compile_core.lowering.triton_kernels.triton_sides import Side

# Elements with a maximum of their own: what a thread loads together of 16-bit floats.
_GROUP = 8


@dataclass(frozen=True)
class OnlineSum:
    """The lines of a maximum and of the sum that needs it; compare ``TileReduction``. The tile has one row.

    Attributes:
        largest, total: the two statements.
        argument: the value that the maximum is of.
        side: the reduced side, as it is where the lines are to stand.
    """

    largest: int
    total: int
    argument: int
    side: Side

    def start(self) -> list[str]:
        groups = self.side.block // _GROUP
        return [
            f"r{self.largest} = tl.full([{groups}, 1], -float('inf'), tl.float32)",
            f"r{self.total} = tl.full([{groups}, {_GROUP}], 0, tl.float32)",
        ]

    def elements(self) -> list[str]:
        n, block = self.largest, self.side.block
        lines = [f"e{n} = tl.broadcast_to(v{self.argument}, [1, {block}])"]
        if self.side.overhangs:
            lines.append(f"e{n} = tl.where(r_inside, e{n}, -float('inf'))")
        return [*lines, f"e{n} = tl.reshape(e{n}, [{block // _GROUP}, {_GROUP}])"]

    def combined(self) -> list[str]:
        n, total = self.largest, self.total
        return [
            f"n{n} = nan_max(r{n}, tl.reduce(e{n}, 1, nan_max, keep_dims=True))",
            # Where all was -inf so far, differences from it would be no numbers.
            f"d{n} = tl.where(n{n} == -float('inf'), 0.0, n{n})",
            f"r{total} = r{total} * exp32(r{n} - d{n}) + quick_exp(e{n} - d{n})",
            f"r{n} = n{n}",
        ]

    def finished(self) -> list[str]:
        n, total = self.largest, self.total
        of_groups = f"tl.sum(r{total}, 1, keep_dims=True) * exp32(r{n} - v{n})"
        return [
            f"v{n} = tl.reduce(r{n}, 0, nan_max, keep_dims=True)",
            f"v{total} = tl.sum({of_groups}, 0, keep_dims=True)",
        ]


def online_sums(analysis: NestAnalysis) -> dict[int, int]:
    """The maxima after which a whole walk only sums exponentials of differences from them, and those sums."""
    found: dict[int, int] = {}
    for first, second in zip(analysis.passes, analysis.passes[1:], strict=False):
        sums = {_largest_of(analysis, total): total for total in second.reduces}
        if not second.stores and len(sums) == len(second.reduces) and set(sums) <= set(first.reduces):
            found |= {largest: total for largest, total in sums.items() if largest is not None}
    return found


def _largest_of(analysis: NestAnalysis, total: int) -> int | None:
    """The maximum that a sum of exponentials takes differences from, all in float32."""
    body = analysis.nest.body
    summed = body[total]
    if not isinstance(summed, Reduce) or summed.operation != "sum" or summed.dtype != torch.float32:
        return None
    power = body[summed.argument]
    if not isinstance(power, Apply) or power.operation != "exp":
        return None
    difference = body[power.arguments[0]]
    if not isinstance(difference, Apply) or difference.operation != "sub":
        return None
    value, largest = difference.arguments
    maximum = body[largest]
    return largest if maximum == Reduce("max", value, torch.float32) else None
