"""How a nest of rows is cut into bands for a GPU: rows a program, rows at a time, and warps."""

from __future__ import annotations

from math import prod

from compile_core.ir.loops import BandNest, Load, LoopNest
from compile_core.lowering.tiling_triton import GpuTiling, power_of_two

# A program's registers, in elements: values of a whole row that are live at once, times the row's length.
_BUDGET = 32768
# Measured on a layer norm's backward over 8192 rows of 768 on an H200: threads with 16 elements each, as many as run at
# once with this many registers, take four fifths of the time of half as many programs whose threads have 8 elements; a
# row that is loaded while the one before it is worked on saves as much again. Four times fewer bands take twice that.
_ELEMENTS_OF_A_THREAD = 16
_THREADS = 1 << 16
REGISTERS = 128
ROWS_IN_FLIGHT = 2
_LEAST_BANDS = 128
_SHORTEST_BAND = 8
# Short rows go together, so that there is more than a warp to wait for memory.
_LEAST_TILE = 1024


def band_of(nest: LoopNest, sums: int) -> int | None:
    """How many rows a program takes; ``None`` if there are too few rows, or a row is too long for the registers."""
    rows, columns = nest.extents
    loaded = {s.access for s in nest.body if isinstance(s, Load) and s.access.strides[1]}
    if power_of_two(columns) * (1 + len(loaded) + sums) > _BUDGET:
        return None
    wanted = _THREADS // (32 * _warps(max(power_of_two(columns), _LEAST_TILE)))
    longest = rows // _LEAST_BANDS
    bands = [rows // band for band in range(_SHORTEST_BAND, longest + 1) if rows % band == 0]
    return rows // min(bands, key=lambda count: abs(count - wanted)) if bands else None


def tile_bands(step: BandNest) -> GpuTiling:
    """The tile of a step of a program: one row or a few, all columns."""
    columns = power_of_two(step.rows.extents[1])
    together = 1
    while columns * together < _LEAST_TILE and step.band % (2 * together) == 0:
        together *= 2
    return GpuTiling((0,), (), together, 1, columns, True, _warps(columns * together))


def _warps(elements: int) -> int:
    return max(1, min(16, elements // (32 * _ELEMENTS_OF_A_THREAD)))


def partial_bytes(nest: LoopNest, band: int) -> int:
    """What a sum over all bands' rows writes and reads again, in bytes of float32."""
    rows, columns = nest.extents
    return 2 * 4 * prod((rows // band, columns))
