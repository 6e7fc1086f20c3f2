"""Triton source of a nest of rows that also adds up columns.

A program walks its band of rows a few at a time. Each step is what a persistent kernel does with a tile of rows; what
is to be added up goes into accumulators of the tile's size, so that nothing but the last addition crosses threads.
Values that are the same in all rows are loaded once for the band.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import BandNest, Reduce, Store
from gradsplit.compile_core.ir.step_effects import writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.passes import buffers_of
from gradsplit.compile_core.lowering.tiling.tiling_bands import rows_in_flight, tile_bands
from gradsplit.compile_core.lowering.triton_kernels import scalar_triton
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import TritonWriter, triton_source


def generate_bands(step: BandNest, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for one such nest over the buffers of one GPU.

    Raises:
        Unsupported: a dtype that Triton kernels do not handle.
    """
    names = tuple(dict.fromkeys([*buffers_of(step.rows), *sorted(writes(step))]))
    writer = _BandWriter(step, buffers, {name: index for index, name in enumerate(names)})
    meta = (("num_warps", writer.tiling.num_warps),)
    return triton_source(step.name, names, buffers, writer.lines(), writer.grid(), meta)


class _BandWriter(TritonWriter):
    def __init__(
        self, step: BandNest, buffers: Mapping[str, TensorSpec], positions: Mapping[str, int]
    ) -> None:
        super().__init__(step.rows, buffers, positions, tile_bands(step))
        self.step = step
        self.blocks_in_order = True

    def grid(self) -> tuple[int, int, int]:
        return (self.x.count // self.step.band, 1, 1)

    def lines(self) -> list[str]:
        tiling, band, columns = self.tiling, self.step.band, self.r.count
        lines = [
            f"program = {self._program()}",
            f"r = tl.arange(0, {tiling.r_block})[None, :]" + (".to(tl.int64)" if self.wide else ""),
            *self.masks_and_axes(self.r),
        ]
        once = [
            n
            for n, statement in enumerate(self.nest.body)
            if not self.analysis.axes[n] & set(self.x.axes) and not isinstance(statement, Reduce | Store)
        ]
        lines += [line for n in once for line in self.statement(n)]
        shape = f"[{tiling.x_block}, {tiling.r_block}]"
        summed = dict.fromkeys(value for value, _ in self.step.sums)
        for value in summed:
            lines.append(f"c{value} = tl.full({shape}, 0, {scalar_triton.value_type(self.dtypes[value])})")
        inner = [
            f"x = program * {band} + row + tl.arange(0, {tiling.x_block})[:, None]",
            *self.masks_and_axes(self.x),
        ]
        each = [n for n in range(len(self.nest.body)) if n not in once]
        inner += [line for n in self.loads_first(each) for line in self.whole_statement(n)]
        inner += [f"c{value} += tl.broadcast_to(v{value}, {shape})" for value in summed]
        lines.append(
            f"for row in tl.range(0, {band}, {tiling.x_block}, num_stages={rows_in_flight(self.step)}):"
        )
        lines += [f"    {line}" for line in inner]
        mask = ", mask=r_inside" if self.r.overhangs else ""
        for value, name in self.step.sums:
            total = f"tl.sum(c{value}, 0, keep_dims=True)"
            lines.append(f"tl.store(p{self.positions[name]} + (program * {columns} + r), {total}{mask})")
        return lines
