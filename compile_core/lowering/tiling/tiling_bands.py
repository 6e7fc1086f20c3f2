"""How a nest of rows is cut into bands for a GPU: rows a program, rows at a time, and warps."""

from __future__ import annotations

from math import prod

from gradsplit.compile_core.ir.loops import BandNest, Load, LoopNest
from gradsplit.compile_core.lowering.tiling.tiling_triton import GpuTiling, power_of_two

# A program's registers, in elements: values of a whole row that are live at once, times the row's length.
_BUDGET = 32768
# Measured on three layer norms' backwards over 8192 rows of 768 on an H200: threads with 8 elements each, of which 16
# warps run on each processor, and two rows that are on their way from memory while one is worked on. Without these it
# takes a quarter more; threads with 16 elements, which 64 or 128 registers each do not hold, take up to a fifth more.
_ELEMENTS_OF_A_THREAD = 8
_THREADS = 1 << 16
_MOST_ROWS_IN_FLIGHT = 3
# Of the memory that the programs of a processor share, in which rows arrive.
_BYTES_IN_FLIGHT = 98304
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


def rows_in_flight(step: BandNest) -> int:
    """How many steps of a program's rows are loaded or worked on at once."""
    loads = {s.access: s.dtype for s in step.rows.body if isinstance(s, Load) and all(s.access.strides)}
    row = power_of_two(step.rows.extents[1]) * tile_bands(step).x_block
    bytes_of_rows = row * sum(dtype.itemsize for dtype in loads.values())
    return max(1, min(_MOST_ROWS_IN_FLIGHT, _BYTES_IN_FLIGHT // max(1, bytes_of_rows)))


def _warps(elements: int) -> int:
    return max(1, min(16, elements // (32 * _ELEMENTS_OF_A_THREAD)))


def partial_bytes(nest: LoopNest, band: int) -> int:
    """What a sum over all bands' rows writes and reads again, in bytes of float32."""
    rows, columns = nest.extents
    return 2 * 4 * prod((rows // band, columns))
