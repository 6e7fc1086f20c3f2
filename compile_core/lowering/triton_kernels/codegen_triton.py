"""Triton source of a loop nest.

A value is a tensor of just the sides of the tile over which it varies, with size-1 dims for the others:
``[X]`` in a pointwise nest, ``[X, 1]``, ``[1, R]`` or ``[X, R]`` in one that reduces, ``[Y, X]`` in one that
transposes; broadcasting does the rest. Where each program has a part of one long row, what varies from row to row is a
scalar. A persistent tile needs no passes: statements follow each other as in the nest's body. Otherwise each pass of
``passes.py`` is a loop over blocks of R that accumulates a tile, which is reduced once after the loop.

A gathered index that is out of range never leads to an access outside the buffer: a store is left out, a load
yields NaN (0 for integers). Kernels cannot raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Literal

import torch

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    Load,
    LoopNest,
    Position,
    Reduce,
    Store,
    operands,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, simplify
from gradsplit.compile_core.lowering.nests.passes import (
    NestAnalysis,
    NestPass,
    analyse,
    buffers_of,
    value_dtypes,
)
from gradsplit.compile_core.lowering.tiling.tiling_triton import (
    LARGEST_INT32,
    MOST_TOGETHER,
    GpuTiling,
    tile_for_gpu,
)
from gradsplit.compile_core.lowering.triton_kernels import scalar_triton
from gradsplit.compile_core.lowering.triton_kernels.exact_quotients import product_of_quotient
from gradsplit.compile_core.lowering.triton_kernels.online_sums import OnlineSum, online_sums
from gradsplit.compile_core.lowering.triton_kernels.triton_reductions import TileReduction
from gradsplit.compile_core.lowering.triton_kernels.triton_sides import Side

_MOST_EARLY_LOADS = 8


def generate_triton(nest: LoopNest, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for one nest over the buffers of one GPU.

    Args:
        nest: a valid nest.
        buffers: specs of at least the buffers that it names.

    Raises:
        Unsupported: a dtype that Triton kernels do not handle (complex, quantised).
    """
    names = buffers_of(nest)
    writer = TritonWriter(simplify(nest), buffers, {name: index for index, name in enumerate(names)})
    return triton_source(
        nest.name, names, buffers, writer.lines(), writer.grid(), (("num_warps", writer.tiling.num_warps),)
    )


def triton_source(
    name: str,
    names: Sequence[str],
    buffers: Mapping[str, TensorSpec],
    lines: Sequence[str],
    grid: tuple[int, int, int],
    meta: tuple[tuple[str, int], ...],
) -> KernelSource:
    """The kernel that has these lines as its body, and these buffers as ``p0``, ``p1`` and so on."""
    parameters = ", ".join(f"p{index}" for index in range(len(names)))
    text = ["@triton.jit", f"def {KERNEL_SYMBOL}({parameters}):", *(f"    {line}" for line in lines)]
    return KernelSource(
        name=name,
        language="triton",
        text="\n".join(text),
        buffers=tuple(names),
        device=buffers[names[0]].device if names else torch.device("cuda"),
        pointers=tuple(scalar_triton.pointer_type(buffers[buffer].dtype) for buffer in names),
        grid=grid,
        meta=meta,
    )


class TritonWriter:
    """Writes the body of one kernel, with a tiling of its own choice if it is given none."""

    def __init__(
        self,
        nest: LoopNest,
        buffers: Mapping[str, TensorSpec],
        positions: Mapping[str, int],
        tiling: GpuTiling | None = None,
    ) -> None:
        self.nest = nest
        self.buffers = buffers
        self.positions = positions
        self.tiling = tiling or tile_for_gpu(nest)
        self.analysis: NestAnalysis = analyse(nest, 0)
        self.parallel = parallel_axes(nest)
        self.dtypes = value_dtypes(nest)
        self.x = self.side("x", self.tiling.x_axes, self.tiling.x_block)
        self.y = self.side("y", self.tiling.y_axes, self.tiling.y_block)
        self.r = self.side("r", range(self.parallel, len(nest.extents)), self.tiling.r_block)
        self.sides = (self.x, self.y, self.r)
        self.blocks_in_order = tiling is None
        self.wide = _needs_int64(nest)
        # Of the rows that a program walks alone, maxima by the sums that need them: both are done in one walk.
        walks_a_row = self.tiling.x_block == 1 and self.r.block >= 256 and self._has_neighbours(self.r)
        self.online = online_sums(self.analysis) if walks_a_row and not self.tiling.persistent else {}

    def side(self, name: str, axes: Sequence[int], block: int) -> Side:
        return Side(name, tuple(axes), tuple(self.nest.extents[axis] for axis in axes), block)

    def grid(self) -> tuple[int, int, int]:
        x_programs = -(-self.x.count // self.tiling.x_block)
        y_programs = -(-self.y.count // self.tiling.y_block)
        return (x_programs * y_programs, 1, 1)

    def pointer(self, buffer: str) -> str:
        """Where the kernel has a buffer."""
        return f"p{self.positions[buffer]}"

    def _program(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"

    # ---- indices ----------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        tiling, lines, program = self.tiling, [], self._program()
        if tiling.y_axes:
            x_programs = -(-self.x.count // tiling.x_block)
            lines.append(f"program = {program}")
            # Along the axes of Y a program is at one point, unless its tile has both sides.
            dims, y = "[:, None]" if self.nest.reduced_axes else "", f"program // {x_programs}"
            if tiling.y_block > 1:
                dims, y = "[None, :]", f"{y} * {tiling.y_block} + tl.arange(0, {tiling.y_block})[:, None]"
            lines.append(
                f"x = program % {x_programs} * {tiling.x_block} + tl.arange(0, {tiling.x_block}){dims}"
            )
            lines.append(f"y = {y}")
            lines += self.masks_and_axes(self.y)
        else:
            dims = "[:, None]" if self.nest.reduced_axes else ""
            lines.append(f"x = {program} * {tiling.x_block} + tl.arange(0, {tiling.x_block}){dims}")
        lines += self.masks_and_axes(self.x)
        body = self._reducing if self.nest.reduced_axes else self._pointwise
        # Blocks of long rows, each program one, or one of each of its rows.
        is_of_rows = self.y.axes and self.y.block == self.r.block == 1
        whole = self._whole_blocks(self.x) if is_of_rows else 0
        if not whole:
            return lines + body()
        with self._without_overhang("x"):
            inside = [f"    {line}" for line in body()]
        blocks = -(-self.x.count // self.x.block)
        last = [f"    {line}" for line in body()]
        return [*lines, f"if program % {blocks} < {whole // self.x.block}:", *inside, "else:", *last]

    def masks_and_axes(self, side: Side) -> list[str]:
        """The side's mask, and the index along each of its axes that some access needs."""
        needed = {
            axis
            for _, strides in _walks(self.nest)
            if side.step(strides) is None
            for axis in side.axes
            if strides[axis]
        }
        return side.index_lines(needed)

    def _pointwise(self) -> list[str]:
        return [line for n in self.loads_first(range(len(self.nest.body))) for line in self.statement(n)]

    # ---- reductions -------------------------------------------------------------------------------------

    def _reducing(self) -> list[str]:
        r_base = f"r_base = tl.arange(0, {self.tiling.r_block})[None, :]"
        lines = [r_base + (".to(tl.int64)" if self.wide else "")]
        if self.tiling.persistent:
            return lines + self._persistent()
        for step in self.analysis.passes:
            lines += [line for n in step.before for line in self.statement(n)]
            if step.walks and not set(step.reduces) & set(self.online.values()):
                lines += self._looped(step)
        return lines

    def _persistent(self) -> list[str]:
        lines = ["r = r_base", *self.masks_and_axes(self.r)]
        in_order = self.loads_first(range(len(self.nest.body)))
        return lines + [line for n in in_order for line in self.whole_statement(n)]

    def loads_first(self, numbers: Sequence[int]) -> list[int]:
        """Statements in an order in which loads come first, if these are not too many to hold.

        The compiler moves no load across a barrier, which each reduction is, or across a store, which it cannot tell
        from others: a load after one would wait for memory once more. What is the same for all of a tile's X, such as
        the weights of a layer norm, is near, and stays where it is: it would only take registers.
        """
        stored = {s.access.buffer for s in self.nest.body if isinstance(s, Store)}
        loads = [
            n
            for n in numbers
            if isinstance(s := self.nest.body[n], Load)
            and s.access.buffer not in stored
            and self.analysis.axes[n] & set(self.x.axes)
        ]
        early: set[int] = set()
        pending = loads if len(loads) <= _MOST_EARLY_LOADS else []
        while pending:
            n = pending.pop()
            if n in numbers and n not in early:
                early.add(n)
                pending += operands(self.nest.body[n])
        if any(isinstance(self.nest.body[n], Reduce) for n in early):
            return list(numbers)
        return [*sorted(early), *(n for n in numbers if n not in early)]

    def whole_statement(self, n: int) -> list[str]:
        """A statement of a tile that holds rows as a whole."""
        statement = self.nest.body[n]
        if isinstance(statement, Reduce):
            reduction = self._tile_reduction(n, statement)
            return [*reduction.elements(), *reduction.of_whole_rows()]
        return self.statement(n)

    def _looped(self, step: NestPass) -> list[str]:
        reductions = [
            self._reduction(n, s)
            for n, s in enumerate(self.nest.body)
            if n in step.reduces and isinstance(s, Reduce)
        ]
        lines = [line for reduction in reductions for line in reduction.start()]
        whole = self._whole_blocks(self.r)
        if whole:
            with self._without_overhang("r"):
                lines += self._blocks(step, 0, whole)
        lines += self._blocks(step, whole, self.r.count)
        return lines + [line for reduction in reductions for line in reduction.finished()]

    def _blocks(self, step: NestPass, start: int, stop: int) -> list[str]:
        """A pass over a part of the reduced space."""
        loop = ["r = r_start + r_base", *self.masks_and_axes(self.r)]
        for n in self.loads_first(sorted((*step.values, *step.reduces, *step.stores))):
            statement = self.nest.body[n]
            if isinstance(statement, Reduce):
                reduction = self._reduction(n, statement)
                loop += [*reduction.elements(), *reduction.combined()]
            else:
                loop += self.statement(n)
        blocks = f"{start}, {stop}, {self.tiling.r_block}"
        ahead = self.tiling.blocks_in_flight
        steps = f"tl.range({blocks}, num_stages={ahead})" if ahead > 1 else f"range({blocks})"
        head = f"for r_start in {steps}:"
        return [head, *(f"    {line}" for line in loop)]

    def _reduction(self, n: int, statement: Reduce) -> TileReduction | OnlineSum:
        if n in self.online:
            return OnlineSum(n, self.online[n], statement.argument, self.r)
        return self._tile_reduction(n, statement)

    def _tile_reduction(self, n: int, statement: Reduce) -> TileReduction:
        return TileReduction(n, statement, self.dtypes[statement.argument], self.tiling.x_block, self.r)

    def _whole_blocks(self, side: Side) -> int:
        """Up to where blocks need no mask, if one would keep all of them from being read 16 bytes at a time.

        Triton reads neighbours together if it knows that they have one mask, as it does where rows end at a multiple.
        """
        is_odd = side.overhangs and side.count % MOST_TOGETHER != 0 and self._has_neighbours(side)
        return side.count // side.block * side.block if is_odd else 0

    def _has_neighbours(self, side: Side) -> bool:
        """Whether something is read or written along the side, one element next to the other."""
        walks = (s.access.strides for s in self.nest.body if isinstance(s, Load | Store))
        return any(side.step(strides) == 1 for strides in walks)

    @contextmanager
    def _without_overhang(self, side: Literal["x", "r"]) -> Iterator[None]:
        """Inside, what is written is for whole blocks of the side."""
        sides = self.x, self.y, self.r
        setattr(self, side, replace(getattr(self, side), has_whole_blocks=True))
        self.sides = (self.x, self.y, self.r)
        try:
            yield
        finally:
            self.x, self.y, self.r = self.sides = sides

    # ---- statements -------------------------------------------------------------------------------------

    def statement(self, n: int) -> list[str]:
        statement = self.nest.body[n]
        match statement:
            case Load():
                return self.load(n, statement)
            case Store():
                return self._store(n, statement)
            case Constant(value=value, dtype=dtype):
                return [f"v{n} = {scalar_triton.literal(value, dtype)}"]
            case Position(strides=strides, offset=offset):
                terms = [*self._terms(strides), *([str(offset)] if offset else [])]
                return [f"v{n} = ({' + '.join(terms)}).to(tl.int64)"]
            case Apply(operation="random_word", arguments=(seed, _)) if self._comes_in_pairs(statement):
                return [f"v{n} = both_words(v{seed}, {self._half_position(statement)})"]
            case Apply(operation="add") if (argument := self._erf_beside_one(statement)) is not None:
                return [f"v{n} = one_and_erf32(v{argument})"]
            case Apply(operation="div", arguments=(number, _)) if parts := self._product(statement):
                high, low = (scalar_triton.literal(part, torch.float32) for part in parts)
                return [f"v{n} = tl.fma(v{number}, {high}, v{number} * {low})"]
            case Apply(arguments=arguments):
                dtypes = [self.dtypes[argument] for argument in arguments]
                expression = scalar_triton.apply(statement, [f"v{a}" for a in arguments], dtypes)
                return [f"v{n} = {expression}"]
            case Reduce():
                return []

    def _product(self, quotient: Apply) -> tuple[float, float] | None:
        """What a bfloat16 is multiplied by where it is divided by a constant."""
        number, divisor = (self.nest.body[argument] for argument in quotient.arguments)
        match number:
            case Load(access=access, dtype=torch.float32):
                is_short = self.buffers[access.buffer].dtype == torch.bfloat16
            case Apply(operation="round_to", dtype=torch.float32, parameter=torch.bfloat16):
                is_short = True
            case _:
                return None
        if is_short and isinstance(divisor, Constant) and quotient.dtype == divisor.dtype == torch.float32:
            return product_of_quotient(float(divisor.value))
        return None

    def _erf_beside_one(self, added: Apply) -> int | None:
        """Of which statement this adds the error function and 1, as a normal distribution's function does."""
        for one, other in (added.arguments, added.arguments[::-1]):
            match self.nest.body[one], self.nest.body[other]:
                case Constant(value=1.0), Apply("erf", (argument,), torch.float32):
                    return argument
        return None

    def _comes_in_pairs(self, word: Apply) -> bool:
        """Whether neighbours along the last side of the tile take the two words of one block of random bits."""
        seed, position = word.arguments
        walk = self.nest.body[position]
        fast = self.r if self.nest.reduced_axes else self.x
        return (
            isinstance(walk, Position)
            and not self.analysis.axes[seed]
            and self.blocks_in_order
            and not self.y.axes
            and fast.step(walk.strides) == 1
            and fast.block > 1
            and all(walk.strides[axis] % 2 == 0 for axis in self.x.axes if fast is self.r)
            and walk.offset % 2 == 0
        )

    def _half_position(self, word: Apply) -> str:
        """The positions of the blocks that a tile takes words from: half as many along the last side."""
        walk = self.nest.body[word.arguments[1]]
        assert isinstance(walk, Position)
        if not self.nest.reduced_axes:
            half = self.x.block // 2
            terms = [f"{self._program()} * {half} + tl.arange(0, {half})"]
        else:
            start = "" if self.tiling.persistent else "r_start // 2 + "
            terms = [f"{start}tl.arange(0, {self.r.block // 2})[None, :]"]
            terms += self.x.terms([stride // 2 for stride in walk.strides])
        if walk.offset:
            terms.append(str(walk.offset // 2))
        return f"({' + '.join(terms)}).to(tl.int64)"

    def load(self, n: int, statement: Load) -> list[str]:
        access = statement.access
        varied = _varied(access).union(*(self.analysis.axes[operand] for operand in operands(statement)))
        lines, address, valid = self._address(n, access, varied)
        masks = self._masks(statement.mask, varied) + valid
        memory = self.buffers[access.buffer].dtype
        arguments = [f"{self.pointer(access.buffer)} + {address}"]
        if masks:
            other = int(statement.other) if memory == torch.bool else statement.other
            other = scalar_triton.bare_literal(other, torch.uint8 if memory == torch.bool else memory)
            arguments += [f"mask={' & '.join(masks)}", f"other={other}"]
        read = scalar_triton.loaded(f"tl.load({', '.join(arguments)})", memory, statement.dtype)
        lines.append(f"v{n} = {read}")
        if valid and statement.dtype.is_floating_point:
            wrong = " | ".join(f"~({mask})" for mask in valid)
            wanted = "" if statement.mask is None else f" & v{statement.mask}"
            lines.append(f"v{n} = tl.where(({wrong}){wanted}, float('nan'), v{n})")
        return lines

    def _store(self, n: int, statement: Store) -> list[str]:
        access = statement.access
        lines, address, valid = self._address(n, access, self.analysis.axes[n])
        if self.nest.reduced_axes and not any(access.strides) and not access.gathers:
            address = f"{address} + x * 0"  # values of the parallel axes have the shape of x
        masks = self._masks(statement.mask, self.analysis.axes[n]) + valid
        memory = self.buffers[access.buffer].dtype
        number = statement.value
        rounded = self.nest.body[number]
        if isinstance(rounded, Apply) and rounded.operation == "round_to" and rounded.parameter == memory:
            number = rounded.arguments[0]  # the store rounds
        value = scalar_triton.stored(f"v{number}", self.dtypes[number], memory)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        place = f"{self.pointer(access.buffer)} + {address}"
        if statement.reduction is None:
            return [*lines, f"tl.store({place}, {value}{mask})"]
        assert statement.reduction == "sum", "only kernels for CPUs find extrema in memory"
        # In what order they come is not said, nor does anybody in the kernel read what they leave.
        return [*lines, f"tl.atomic_add({place}, {value}{mask}, sem='relaxed')"]

    def _terms(self, strides: Sequence[int]) -> list[str]:
        return [term for side in self.sides for term in side.terms(strides)]

    def _address(self, n: int, access: Access, varied: frozenset[int]) -> tuple[list[str], str, list[str]]:
        """Lines that compute gathered indices, the address, and which of the indices are in range. The
        address has all sides that ``varied`` names, since a mask may not have more of them than it."""
        terms, lines, valid = self._terms(access.strides), [], []
        for k, gather in enumerate(access.gathers):
            index = f"x{n}_{k}"
            lines.append(f"{index} = v{gather.value}.to(tl.int64)")
            if gather.wraps:
                lines.append(f"{index} = tl.where({index} < 0, {index} + {gather.size}, {index})")
            lines.append(f"{index}_inside = ({index} >= 0) & ({index} < {gather.size})")
            valid.append(f"{index}_inside")
            terms.append(f"{index} * {gather.stride}")
        own = _varied(access).union(*(self.analysis.axes[gather.value] for gather in access.gathers))
        for side in self.sides:
            if varied & set(side.axes) and not own & set(side.axes):
                terms.append(f"{side.name} * 0")
        if access.offset or not terms:
            terms.append(str(access.offset))
        return lines, f"({' + '.join(terms)})", valid

    def _masks(self, mask: int | None, varied: frozenset[int]) -> list[str]:
        """The sides' masks that an access needs, and its own."""
        masks = [f"{side.name}_inside" for side in self.sides if side.overhangs and varied & set(side.axes)]
        return masks if mask is None else [*masks, f"v{mask}"]


def _varied(access: Access) -> frozenset[int]:
    return frozenset(axis for axis, stride in enumerate(access.strides) if stride)


def _walks(nest: LoopNest) -> list[tuple[int, tuple[int, ...]]]:
    """Offset and strides of every access and every position."""
    walks = [(s.access.offset, s.access.strides) for s in nest.body if isinstance(s, Load | Store)]
    return walks + [(s.offset, s.strides) for s in nest.body if isinstance(s, Position)]


def _needs_int64(nest: LoopNest) -> bool:
    """Whether a flat index or an address may leave the range of int32, the last block's overhang included."""
    if prod(nest.extents) > LARGEST_INT32:
        return True
    for offset, strides in _walks(nest):
        reach = abs(offset)
        reach += sum(abs(stride) * extent for stride, extent in zip(strides, nest.extents, strict=True))
        if reach > LARGEST_INT32:
            return True
    return False
