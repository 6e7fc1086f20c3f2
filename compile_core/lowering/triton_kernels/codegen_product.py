"""Triton source of a matrix product with an epilogue.

A program computes one block of the result: it walks the inner side in steps, adds the products of two blocks to an
accumulator in float32, and then executes the epilogue's body on it as a pointwise nest executes its own on a tile, rows
along Y and columns along X. Programs that run at the same time lie in a few rows of blocks, so that what they read
stays in the L2 cache (the order of Triton's tutorial on matrix multiplication).
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import Load, ProductNest, View
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.tiling.tiling_triton import GpuTiling
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import TritonWriter, triton_source

_ROWS_OF_BLOCKS = 8


def generate_product(nest: ProductNest, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for one product over the buffers of one GPU.

    Raises:
        Unsupported: a dtype in the epilogue that Triton kernels do not handle.
    """
    names = tuple(sorted(reads(nest) | writes(nest)))
    writer = _ProductWriter(nest, buffers, {name: index for index, name in enumerate(names)})
    meta = (("num_warps", nest.tile.warps), ("num_stages", nest.tile.stages))
    return triton_source(nest.name, names, buffers, writer.lines(), writer.grid(), meta)


class _ProductWriter(TritonWriter):
    def __init__(
        self, nest: ProductNest, buffers: Mapping[str, TensorSpec], positions: Mapping[str, int]
    ) -> None:
        batch, rows = nest.axes[0], nest.axes[0] + nest.axes[1]
        tiling = GpuTiling(
            x_axes=tuple(range(rows, sum(nest.axes))),
            y_axes=tuple(range(batch, rows)),
            x_block=nest.tile.columns,
            y_block=nest.tile.rows,
            r_block=1,
            persistent=False,
            num_warps=nest.tile.warps,
        )
        super().__init__(nest.epilogue, buffers, positions, tiling)
        self.product = nest
        self.batch = self.side("z", range(batch), 1)
        self.sides = (*self.sides, self.batch)
        self.y_programs = -(-self.y.count // nest.tile.rows)
        self.x_programs = -(-self.x.count // nest.tile.columns)

    def grid(self) -> tuple[int, int, int]:
        return (self.x_programs * self.y_programs, self.batch.count, 1)

    def lines(self) -> list[str]:
        tile, rows, columns = self.product.tile, self.y.count, self.x.count
        inner = self.product.left.shape[-1]
        partial = inner % tile.inner != 0
        wide = ".to(tl.int64)" if self.wide else ""
        lines = [
            "program = tl.program_id(0)",
            f"group = program // {_ROWS_OF_BLOCKS * self.x_programs} * {_ROWS_OF_BLOCKS}",
            f"height = min({self.y_programs} - group, {_ROWS_OF_BLOCKS})",
            f"within = program % {_ROWS_OF_BLOCKS * self.x_programs}",
            f"y_first = (group + within % height) * {tile.rows}",
            f"x_first = within // height * {tile.columns}",
            # What reaches beyond the result multiplies some other row or column, which nobody stores.
            f"left_row = (y_first + tl.arange(0, {tile.rows})) % {rows}",
            f"right_column = (x_first + tl.arange(0, {tile.columns})) % {columns}",
            f"k = tl.arange(0, {tile.inner})",
        ]
        left, right = self.product.left, self.product.right
        lines.append(f"left = {self._pointer(left)} + {_block('left_row', 'k', left)}")
        lines.append(f"right = {self._pointer(right)} + {_block('k', 'right_column', right)}")
        lines.append(f"accumulated = tl.zeros([{tile.rows}, {tile.columns}], tl.float32)")
        step = []
        for name, side in (("left", "None, :"), ("right", ":, None")):
            mask = f", mask=k[{side}] < {inner} - first, other=0.0" if partial else ""
            step.append(f"{name}_block = tl.load({name}{mask})")
        step.append(
            "accumulated = tl.dot(left_block, right_block, accumulated, "
            f'input_precision="{self.product.precision}")'
        )
        step.append(f"left += {tile.inner * left.stride[-1]}")
        step.append(f"right += {tile.inner * right.stride[-2]}")
        lines.append(f"for first in range(0, {inner}, {tile.inner}):")
        lines += [f"    {line}" for line in step]
        lines.append(f"y = (y_first + tl.arange(0, {tile.rows})[:, None]){wide}")
        lines.append(f"x = (x_first + tl.arange(0, {tile.columns})[None, :]){wide}")
        lines += self.masks_and_axes(self.y)
        lines += self.masks_and_axes(self.x)
        if self.batch.axes:
            lines.append(f"z = tl.program_id(1){wide}")
            lines += self.masks_and_axes(self.batch)  # a program has one batch, so nothing overhangs
        return lines + [line for n in range(len(self.nest.body)) for line in self.statement(n)]

    def load(self, n: int, statement: Load) -> list[str]:
        if statement.access.buffer == self.product.product:
            return [f"v{n} = accumulated"]
        return super().load(n, statement)

    def _pointer(self, view: View) -> str:
        pointer = f"p{self.positions[view.buffer]}"
        if view.offset:
            pointer += f" + {view.offset}"
        if len(view.shape) == 3 and view.stride[0]:
            pointer += f" + tl.program_id(1).to(tl.int64) * {view.stride[0]}"
        return pointer


def _block(row: str, column: str, view: View) -> str:
    """Offsets of a block of a matrix."""
    return f"{row}[:, None] * {view.stride[-2]} + {column}[None, :] * {view.stride[-1]}"
