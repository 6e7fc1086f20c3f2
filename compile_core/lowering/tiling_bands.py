"""How a nest of rows is cut into bands for a GPU: rows a program, rows at a time, and warps."""

from __future__ import annotations

from math import prod

from compile_core.ir.loops import BandNest, Load, LoopNest
from compile_core.lowering.tiling_triton import GpuTiling, power_of_two

# A program's registers, in elements: values of a whole row that are live at once, times the row's length.
_BUDGET = 32768
# Programs enough for every processor to have several, few enough for their sums to be small beside what they read.
_WANTED_BANDS = 512
_LEAST_BANDS = 128
_SHORTEST_BAND = 8
_ELEMENTS_OF_A_THREAD = 8
# Short rows go together, so that a program has warps enough to wait for memory in turns.
_LEAST_TILE = 1024


def band_of(nest: LoopNest, sums: int) -> int | None:
    """How many rows a program takes; ``None`` if there are too few rows, or a row is too long for the registers."""
    rows, columns = nest.extents
    loaded = {s.access for s in nest.body if isinstance(s, Load) and s.access.strides[1]}
    if power_of_two(columns) * (1 + len(loaded) + sums) > _BUDGET:
        return None
    longest = rows // _LEAST_BANDS
    bands = [rows // band for band in range(_SHORTEST_BAND, longest + 1) if rows % band == 0]
    return rows // min(bands, key=lambda count: abs(count - _WANTED_BANDS)) if bands else None


def tile_bands(step: BandNest) -> GpuTiling:
    """The tile of a step of a program: one row or a few, all columns."""
    columns = power_of_two(step.rows.extents[1])
    together = 1
    while columns * together < _LEAST_TILE and step.band % (2 * together) == 0:
        together *= 2
    warps = max(1, min(16, columns * together // (32 * _ELEMENTS_OF_A_THREAD)))
    return GpuTiling((0,), (), together, 1, columns, True, warps)


def partial_bytes(nest: LoopNest, band: int) -> int:
    """What a sum over all bands' rows writes and reads again, in bytes of float32."""
    rows, columns = nest.extents
    return 2 * 4 * prod((rows // band, columns))
