"""How kernels of attention are cut: one table, by dtype and by the elements of a row.

The numbers are those that TorchInductor takes on an H100 for the same sizes; a tile divides the blocks of the block
mask, and is no longer than what it covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gradsplit.compile_core.ir.loops import AttentionTile

LEAST_SIDE = 16  # of a product of two matrices in Triton
MOST_ELEMENTS = 256

# Part -> for rows of up to so many elements: the tile of 16-bit floats, and of float32.
_TILES: Mapping[str, Mapping[int, tuple[AttentionTile, AttentionTile]]] = {
    "forward": {
        64: (AttentionTile(128, 128, 3, 4), AttentionTile(128, 32, 3, 4)),
        128: (AttentionTile(128, 64, 3, 8), AttentionTile(32, 64, 3, 4)),
        256: (AttentionTile(64, 32, 3, 4), AttentionTile(32, 32, 3, 4)),
    },
    "query_gradient": {
        32: (AttentionTile(64, 64, 3, 4), AttentionTile(16, 16, 1, 4)),
        128: (AttentionTile(128, 64, 3, 8), AttentionTile(16, 16, 1, 4)),
        256: (AttentionTile(64, 64, 2, 4), AttentionTile(16, 16, 1, 4)),
    },
    "key_gradients": {
        32: (AttentionTile(64, 64, 3, 4), AttentionTile(16, 16, 1, 4)),
        128: (AttentionTile(64, 128, 3, 8), AttentionTile(16, 16, 1, 4)),
        256: (AttentionTile(64, 64, 2, 4), AttentionTile(16, 16, 1, 4)),
    },
}


def attention_tile(
    part: str, dtype: torch.dtype, elements: int, lengths: tuple[int, int], block_sizes: tuple[int, int]
) -> AttentionTile | None:
    """The tile for rows of so many elements; None where none divides the blocks.

    Args:
        lengths: how many queries and keys there are.
        block_sizes: how many of them a block of the block mask has; blocks that cover all of a side say nothing.
    """
    widths = [width for width in _TILES[part] if elements <= width]
    if not widths:
        return None
    tile = _TILES[part][widths[0]][dtype.itemsize != 2]
    sides = []
    for side, length, block in zip((tile.queries, tile.keys), lengths, block_sizes, strict=True):
        longest = max(LEAST_SIDE, power_of_two(length))
        side = min(side, longest)
        while block < length and block % side and side > LEAST_SIDE:
            side //= 2
        if block < length and block % side:
            return None
        sides.append(side)
    return replace(tile, queries=sides[0], keys=sides[1])


def power_of_two(size: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, size - 1).bit_length()
