"""How a simplified nest is cut for a GPU: the tile of a program, and the number of warps.

A tile has an X side, a block of the parallel axes taken as one flat index, and, in a nest that reduces, an R
side, a block of the flat reduced index. Flat indices make neighbouring threads touch neighbouring elements
whatever the axes; the integer divisions that recover the axes have constant divisors. A *persistent* tile
spans the whole reduced space, so that everything is loaded once; else each pass loops over blocks of R. A
pointwise nest that transposes has a second parallel side, Y, so that loads and stores are both contiguous
along a side of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gradsplit.compile_core.ir.loops import Access, Load, LoopNest, Store
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes
from gradsplit.compile_core.lowering.nests.passes import analyse
from gradsplit.compile_core.lowering.tiling.tiling_cpp import is_transposed

_POINTWISE_TILE = 1024
_LIGHT_BODY = 64
_REDUCTION_TILE = 2048
_LOOPED_ROW_BLOCK = 2048
_COLUMN_SIDE = 32
# A sector of float32: narrower ones read in vain.
_NARROWEST_COLUMNS = 8
# Elements of a tile that a warp works on; and where a program's rows are light.
_WARP, _WARP_OF_LIGHT_ROWS = 256, 1024
# Of a program of several light rows, which lie in one warp: a thread's elements are written out, and what is written
# twice as often takes twice as long to compile.
_SEVERAL_LIGHT_ROWS = 512
_SHORT_ROW = 32  # of which a warp holds so many that it needs no other
_TRANSPOSED_SIDE = 32
# Of tiles with both sides in use: 16 bits side by side along a row's axis fill a sector, or half of one where rows
# are long.
_BOTH_SIDES, _LEAST_OF_BOTH_SIDES = 16, 8
# Of column sums that load ahead: a block is a line of memory wide in 16 bits, and what is ahead leaves room in a
# processor's memory for many programs.
_AHEAD_COLUMNS, _AHEAD_ROWS = 64, 16
_BLOCKS_IN_FLIGHT = 3
# Of column sums that read numbers of each row: so many columns of one row after another, for whose numbers a thread has
# one register then. Fewer columns, and shorter ones, have tiles.
_COLUMNS_OF_ROWS, _LEAST_COLUMNS, _LEAST_ROWS = 1024, 8192, 64
_BYTES_IN_FLIGHT = 1 << 14
# Elements times live values that the registers of one program hold without spilling.
_PERSISTENT_BUDGET = 32768
# The same of a program that has a processor's registers nearly to itself.
_LARGEST_BUDGET = 65536
_WANTED_PROGRAMS = 256
_ROW_BLOCK = 2048
# Elements of a byte that one thread reads or writes at once.
MOST_TOGETHER = 16
# Of what is computed in 32 bits: an index may be as far beyond the last element as the last block overhangs.
LARGEST_INT32 = 2**31 - 1 - (1 << 20)
# Of what a nest touches, a part so much smaller than the rest does not decide how it is cut.
_NEGLIGIBLE = 16
LEAST_PRODUCT_SIDE = 16  # of a block that Triton multiplies


@dataclass(frozen=True)
class GpuTiling:
    """See the file's head.

    Attributes:
        x_axes, y_axes: the parallel axes on each side. ``y_axes`` is empty unless the nest transposes, or has no block
            that runs on from one index of these axes to the next.
        x_block, y_block, r_block: sides of the tile, powers of two; 1 where there is no such side.
        persistent: whether ``r_block`` covers the reduced space.
        num_warps: warps of a program.
        blocks_in_flight: of R, how many are loaded or worked on at once.
    """

    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    x_block: int
    y_block: int
    r_block: int
    persistent: bool
    num_warps: int
    blocks_in_flight: int = 1


def tile_for_gpu(nest: LoopNest) -> GpuTiling:
    """Chooses the tiling of a nest that ``simplify`` returned."""
    parallel = parallel_axes(nest)
    if nest.reduced_axes:
        return _tile_reduction(nest)
    transposed = _transposed_side(nest)
    if transposed is not None:
        return _tile_transposed(nest, transposed)
    if _has_odd_rows(nest):
        return GpuTiling((parallel - 1,), tuple(range(parallel - 1)), _ROW_BLOCK, 1, 1, False, 4)
    count = prod(nest.extents)
    # Small arrays go in small blocks, so that more than a few processors work.
    most = 2 * _POINTWISE_TILE if _is_light_and_reads_columns(nest) else _POINTWISE_TILE
    block = max(128, min(most, power_of_two(count // _WANTED_PROGRAMS)))
    return GpuTiling(tuple(range(parallel)), (), block, 1, 1, False, max(1, min(4, block // 128)))


def _is_light_and_reads_columns(nest: LoopNest) -> bool:
    """Whether little is computed of each element and of numbers that each column has, as a batch norm's: threads that
    take twice as many elements took a quarter less time, but where a body is long, as a pooling's, a quarter more."""
    if len(nest.extents) < 2 or len(nest.body) > _LIGHT_BODY:
        return False
    return _column_loads(nest, len(nest.extents) - 1) > 1


def _column_loads(nest: LoopNest, rows: int) -> int:
    """How many loads are of numbers that each column has: they vary along the axes from ``rows`` on alone."""
    loads = [s.access.strides for s in nest.body if isinstance(s, Load)]
    return sum(any(strides[rows:]) and not any(strides[:rows]) for strides in loads)


def _has_odd_rows(nest: LoopNest) -> bool:
    """Whether rows are long, and end where threads that take 16 bytes each would not.

    A block of the flat index would run from one row into the next, at no aligned address.
    """
    if len(nest.extents) < 2 or nest.extents[-1] < 2 * _ROW_BLOCK or nest.extents[-1] % MOST_TOGETHER == 0:
        return False
    return any(s.access.strides[-1] == 1 for s in nest.body if isinstance(s, Load | Store))


def product_side(size: int) -> int:
    """Of the block of a product that covers ``size``."""
    return max(LEAST_PRODUCT_SIDE, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least power of two that is not below ``size``."""
    return 1 << max(0, size - 1).bit_length()


def _tile_reduction(nest: LoopNest) -> GpuTiling:
    parallel = parallel_axes(nest)
    rows, length = prod(nest.extents[:parallel]), prod(nest.extents[parallel:])
    whole = power_of_two(length)
    by_column, goes_across = _contiguous_sides(nest)
    if goes_across and whole * _BOTH_SIDES > _REDUCTION_TILE // 2:
        return _tile_of_both_sides(nest)
    if by_column and _goes_row_by_row(nest):
        columns = parallel - 1
        return GpuTiling((columns,), tuple(range(columns)), _COLUMNS_OF_ROWS, 1, 1, False, 4)
    narrowest = min(_COLUMN_SIDE, power_of_two(rows)) if by_column else 1
    is_short = whole * _NARROWEST_COLUMNS * _live_values(nest) <= _PERSISTENT_BUDGET
    if by_column and is_short and -(-rows // narrowest) < _WANTED_PROGRAMS // 2:
        narrowest = min(narrowest, _NARROWEST_COLUMNS)
    persistent = whole * narrowest * _live_values(nest) <= _PERSISTENT_BUDGET
    if persistent:
        r_block = whole
        x_block = max(narrowest, min(power_of_two(rows), _REDUCTION_TILE // 2 // whole))
    elif by_column:
        x_block = narrowest
        # Loads of several tensors are in flight together; then programs of fewer threads wait for each other less.
        tile = _REDUCTION_TILE // 2 if _live_values(nest) > 2 else _REDUCTION_TILE
        r_block = max(1, min(whole, tile // x_block))
    else:
        x_block, r_block = 1, min(whole, _LOOPED_ROW_BLOCK)
    # Many rows a program are only worth it while there are programs enough.
    while x_block > narrowest and -(-rows // x_block) < _WANTED_PROGRAMS:
        x_block //= 2
    in_flight = 1
    if by_column and _may_load_ahead(nest):
        x_block, r_block = _AHEAD_COLUMNS, _AHEAD_ROWS
        persistent, in_flight = False, _BLOCKS_IN_FLIGHT
    is_thin = (
        persistent and not by_column and _has_light_rows(nest) and -(-rows // x_block) >= _WANTED_PROGRAMS
    )
    if is_thin:
        x_block = max(1, min(x_block, _SEVERAL_LIGHT_ROWS // r_block))
    warps = max(1, min(16, power_of_two(x_block * r_block) // (_WARP_OF_LIGHT_ROWS if is_thin else _WARP)))
    outer = parallel - 1
    if by_column and outer > 0 and nest.extents[outer] % x_block == 0:
        # The columns of parts of a matrix: which part is a number, not a tensor, and so are addresses of its rows.
        return GpuTiling((outer,), tuple(range(outer)), x_block, 1, r_block, persistent, warps, in_flight)
    return GpuTiling(tuple(range(parallel)), (), x_block, 1, r_block, persistent, warps, in_flight)


def _has_light_rows(nest: LoopNest) -> bool:
    """Whether a thread may take four times as many elements of a row, so that a row lies in one warp, or few.

    A warp adds up without waiting for others, and what it loads of columns serves several rows: normalisations took a
    tenth to a half less time so, softmaxes a quarter. What holds more at once, or computes much, took longer.
    """
    parallel = parallel_axes(nest)
    if prod(nest.extents[parallel:]) < _SHORT_ROW:
        return False
    holds_little = _live_values(nest) <= 3 and len(nest.body) <= _LIGHT_BODY // 2
    return holds_little or _column_loads(nest, parallel) > 0


def _may_load_ahead(nest: LoopNest) -> bool:
    """Whether a column sum's next blocks are loaded while it works on one.

    Sums of two matrices' columns, alone and after an activation's gradient, took a tenth less time so. What comes to
    its rows again after a sum holds them instead.
    """
    parallel = parallel_axes(nest)
    rows, length = prod(nest.extents[:parallel]), prod(nest.extents[parallel:])
    bytes_of_block = _AHEAD_COLUMNS * _AHEAD_ROWS * sum(_walking_loads(nest).values())
    return (
        _live_values(nest) > 2
        and nest.extents[parallel - 1] % _AHEAD_COLUMNS == 0
        and rows // _AHEAD_COLUMNS >= _WANTED_PROGRAMS
        and length >= _BLOCKS_IN_FLIGHT * _AHEAD_ROWS
        and bytes_of_block * (_BLOCKS_IN_FLIGHT - 1) <= _BYTES_IN_FLIGHT
        and _walks_once(nest)
    )


def _goes_row_by_row(nest: LoopNest) -> bool:
    """Whether a column sum takes one row after another.

    A cross entropy's gradient, whose rows have a label, a maximum and a sum each, took half as long as by tiles.
    """
    columns = parallel_axes(nest) - 1
    return (
        nest.extents[columns] >= _LEAST_COLUMNS
        and prod(nest.extents[columns + 1 :]) >= _LEAST_ROWS
        and any(not access.strides[columns] for access in _walking_loads(nest))
        and _walks_once(nest)
    )


def _walks_once(nest: LoopNest) -> bool:
    return sum(step.walks for step in analyse(nest, 0).passes) == 1


def _live_values(nest: LoopNest) -> int:
    """Roughly, how many values of the whole tile are live at once: those loaded, and one to work with."""
    return 1 + len(_walking_loads(nest))


def _walking_loads(nest: LoopNest) -> dict[Access, int]:
    """Those that differ along the reduced space, with the bytes of what they yield."""
    reduced = range(parallel_axes(nest), len(nest.extents))
    loads = (s for s in nest.body if isinstance(s, Load))
    return {s.access: s.dtype.itemsize for s in loads if any(s.access.strides[axis] for axis in reduced)}


def _tile_of_both_sides(nest: LoopNest) -> GpuTiling:
    """Of a nest that goes along its rows, but stores or loads across them as well: of one row a program, each element
    of what lies across would be a sector of its own."""
    parallel = parallel_axes(nest)
    whole = power_of_two(prod(nest.extents[parallel:]))
    sides = () if _walks_once(nest) else (_BOTH_SIDES, _LEAST_OF_BOTH_SIDES)
    fitting = ((side, whole) for side in sides if whole * side * _live_values(nest) <= _LARGEST_BUDGET)
    x_block, r_block = next(fitting, (_BOTH_SIDES, min(whole, _REDUCTION_TILE // _BOTH_SIDES)))
    x_block = min(x_block, power_of_two(nest.extents[parallel - 1]))
    warps = max(1, min(16, power_of_two(x_block * r_block) // _WARP))
    rows = tuple(range(parallel - 1))
    return GpuTiling((parallel - 1,), rows, x_block, 1, r_block, r_block == whole, warps)


def _contiguous_sides(nest: LoopNest) -> tuple[bool, bool]:
    """Whether what a nest touches lies contiguous along its last parallel axis as much as along the last reduced one;
    else whether enough of it does that a tile needs both sides.

    Accesses weigh by the elements they touch: a row's statistics that a column sum reads move along the reduced axis
    alone and are nothing beside the matrix. A nest that reads along one axis and writes along the other as much goes by
    column.
    """
    parallel = parallel_axes(nest)
    if not parallel:
        return False, False
    reduced = len(nest.extents) - 1
    along_parallel = along_reduced = 0
    for statement in nest.body:
        if isinstance(statement, Load | Store) and statement.access.strides[reduced]:
            strides = statement.access.strides
            elements = prod(extent for extent, stride in zip(nest.extents, strides, strict=True) if stride)
            along_parallel += elements * (abs(strides[parallel - 1]) == 1)
            along_reduced += elements * (abs(strides[reduced]) == 1)
    if along_parallel >= along_reduced:
        return along_parallel > 0, False
    side = nest.extents[parallel - 1]
    return False, along_parallel * _NEGLIGIBLE >= along_reduced and side >= _LEAST_OF_BOTH_SIDES


def _tile_transposed(nest: LoopNest, transposed: int) -> GpuTiling:
    """Of a pointwise nest that is contiguous along ``transposed`` here and along its last axis there."""
    others = [axis for axis in range(len(nest.extents)) if axis != transposed]
    run = _run(nest, others)
    length = prod(nest.extents[axis] for axis in run)
    sides = power_of_two(nest.extents[transposed]), power_of_two(length)
    # Beside a short side, as the three colours of a pixel, the other is long.
    longest = _POINTWISE_TILE // min(_TRANSPOSED_SIDE, *sides)
    y_block, x_block = (min(side, longest) for side in sides)
    outer = tuple(others[: -len(run)])
    if length % x_block and not nest.extents[transposed] % y_block:
        # No block may run on from one row into the next, which Triton would take for elements that lie apart.
        return GpuTiling(run, (*outer, transposed), x_block, y_block, 1, False, 4)
    return GpuTiling((*outer, *run), (transposed,), x_block, y_block, 1, False, 4)


def _run(nest: LoopNest, axes: Sequence[int]) -> tuple[int, ...]:
    """The last of ``axes``, those along which whatever lies contiguous along the very last runs on: where rotary
    positions turn neighbours in pairs, all pairs of a head."""
    accesses = [s.access.strides for s in nest.body if isinstance(s, Load | Store)]
    contiguous = [strides for strides in accesses if strides[axes[-1]] == 1]
    step, run = nest.extents[axes[-1]], len(axes) - 1
    while contiguous and run and all(strides[axes[run - 1]] == step for strides in contiguous):
        run -= 1
        step *= nest.extents[axes[run]]
    return tuple(axes[run:])


def _transposed_side(nest: LoopNest) -> int | None:
    vector = len(nest.extents) - 1
    for statement in nest.body:
        if not isinstance(statement, Load | Store):
            continue
        for axis in range(vector):
            if nest.extents[axis] >= 8 and is_transposed(statement.access, axis, vector):
                return axis
    return None
