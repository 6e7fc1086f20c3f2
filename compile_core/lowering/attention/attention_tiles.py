"""How kernels of attention are cut: one table, by dtype and by the elements of a row.

Those for 16-bit floats and up to 128 elements were the fastest of a dozen each on an H100 (4 x 16 x 4096 rows, causal,
ALiBi and documents), the others are those of TorchInductor. A tile divides the blocks of the block mask, and is no
longer than what it covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from gradsplit.compile_core.ir.loops import AttentionTile
from gradsplit.compile_core.lowering.tiling.tiling_triton import LEAST_PRODUCT_SIDE, product_side

# Numbers of rows, and what Triton exchanges between threads.
_OTHER_BYTES = 4096
MOST_ELEMENTS = 256

# Part -> for rows of up to so many elements: the tile of 16-bit floats, and of float32.
_TILES: Mapping[str, Mapping[int, tuple[AttentionTile, AttentionTile]]] = {
    "forward": {
        64: (AttentionTile(64, 64, 3, 4), AttentionTile(128, 32, 3, 4)),
        128: (AttentionTile(128, 128, 2, 8), AttentionTile(32, 64, 3, 4)),
        256: (AttentionTile(64, 32, 3, 4), AttentionTile(32, 32, 3, 4)),
    },
    "query_gradient": {
        64: (AttentionTile(64, 64, 3, 4), AttentionTile(16, 16, 1, 4)),
        128: (AttentionTile(128, 128, 2, 8), AttentionTile(16, 16, 1, 4)),
        256: (AttentionTile(64, 64, 2, 4), AttentionTile(16, 16, 1, 4)),
    },
    "key_gradients": {
        256: (AttentionTile(64, 64, 2, 4), AttentionTile(16, 16, 1, 4)),
    },
}


@dataclass(frozen=True)
class AttentionSizes:
    """What a tile is chosen for.

    Attributes:
        elements: of a row of queries or keys, and of a row of values.
        lengths: how many queries and keys there are.
        block_sizes: how many of them a block of the block mask has; one that covers all of a side says nothing.
        shared_bytes: of memory that a program may have.
    """

    dtype: torch.dtype
    elements: tuple[int, int]
    lengths: tuple[int, int]
    block_sizes: tuple[int, int]
    shared_bytes: int


def attention_tile(part: str, sizes: AttentionSizes) -> AttentionTile | None:
    """The tile of a kernel; None where none divides the blocks or finds room."""
    widths = [width for width in _TILES[part] if max(sizes.elements) <= width]
    if not widths:
        return None
    tile = _TILES[part][widths[0]][sizes.dtype.itemsize != 2]
    sides = []
    for side, length, block in zip((tile.queries, tile.keys), sizes.lengths, sizes.block_sizes, strict=True):
        side = min(side, product_side(length))
        while block < length and block % side and side > LEAST_PRODUCT_SIDE:
            side //= 2
        if block < length and block % side:
            return None
        sides.append(side)
    return _with_room(part, replace(tile, queries=sides[0], keys=sides[1]), sizes)


def _with_room(part: str, tile: AttentionTile, sizes: AttentionSizes) -> AttentionTile | None:
    """The tile with fewer stages, or else smaller, where the memory of a program asks for that."""
    while _shared_bytes(part, tile, sizes) > sizes.shared_bytes:
        side = "keys" if tile.keys >= tile.queries else "queries"
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif max(tile.keys, tile.queries) > LEAST_PRODUCT_SIDE:
            tile = replace(tile, **{side: getattr(tile, side) // 2})
        else:
            return None
    return tile


def _shared_bytes(part: str, tile: AttentionTile, sizes: AttentionSizes) -> int:
    """Of the blocks of operands that a program holds: those that it walks once a stage."""
    wide, narrow = map(product_side, sizes.elements)
    stays, walked = (tile.keys, tile.queries) if part == "key_gradients" else (tile.queries, tile.keys)
    kept = wide if part == "forward" else wide + narrow
    return (tile.stages * walked * (wide + narrow) + stays * kept) * sizes.dtype.itemsize + _OTHER_BYTES
