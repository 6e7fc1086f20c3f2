"""Triton source of a loop nest.

A value is a tensor of just the sides of the tile over which it varies, with size-1 dims for the others:
``[X]`` in a pointwise nest, ``[X, 1]``, ``[1, R]`` or ``[X, R]`` in one that reduces, ``[Y, X]`` in one that
transposes; broadcasting does the rest. A persistent tile needs no passes: statements follow each other as in
the nest's body. Otherwise each pass of ``passes.py`` is a loop over blocks of R that accumulates a tile,
which is reduced once after the loop.

A gathered index that is out of range never leads to an access outside the buffer: a store is left out, a load
yields NaN (0 for integers). Kernels cannot raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from compile_core.ir.loops import Access, Apply, Constant, Load, LoopNest, Position, Reduce, Store, operands
from compile_core.ir.tensor_spec import TensorSpec
from compile_core.lowering import scalar_triton
from compile_core.lowering.codegen_cpp_body import value_dtype
from compile_core.lowering.passes import NestAnalysis, Pass, analyse, buffers_of
from compile_core.lowering.tiling_axes import parallel_axes, simplify
from compile_core.lowering.tiling_triton import GpuTiling, tile_for_gpu

_LARGEST_INT32 = 2**31 - 1
_LARGEST_GRID_Y = 65535


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
    parameters = ", ".join(f"p{index}" for index in range(len(names)))
    lines = [
        "@triton.jit",
        f"def {KERNEL_SYMBOL}({parameters}):",
        *(f"    {line}" for line in writer.lines()),
    ]
    return KernelSource(
        name=nest.name,
        language="triton",
        text="\n".join(lines),
        buffers=names,
        device=buffers[names[0]].device if names else torch.device("cuda"),
        pointers=tuple(scalar_triton.pointer_type(buffers[name].dtype) for name in names),
        grid=writer.grid(),
        meta=(("num_warps", writer.tiling.num_warps),),
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
        self.dtypes = [value_dtype(statement) for statement in nest.body]
        self.x_count = prod(nest.extents[axis] for axis in self.tiling.x_axes)
        self.y_count = prod(nest.extents[axis] for axis in self.tiling.y_axes)
        self.r_count = prod(nest.extents[self.parallel :])
        self.wide = _needs_int64(nest)
        self.used = {axis for _, strides in _walks(nest) for axis, stride in enumerate(strides) if stride}

    def grid(self) -> tuple[int, int, int]:
        x_programs = -(-self.x_count // self.tiling.x_block)
        y_programs = -(-self.y_count // self.tiling.y_block)
        return (x_programs * y_programs, 1, 1)

    # ---- indices ----------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        tiling, lines = self.tiling, []
        program = "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"
        if tiling.y_axes:
            x_programs = -(-self.x_count // tiling.x_block)
            lines.append(f"program = {program}")
            lines.append(
                f"x = program % {x_programs} * {tiling.x_block} + tl.arange(0, {tiling.x_block})[None, :]"
            )
            lines.append(
                f"y = program // {x_programs} * {tiling.y_block} + tl.arange(0, {tiling.y_block})[:, None]"
            )
            lines += self.masks_and_axes("y", tiling.y_axes, self.y_count, tiling.y_block)
        else:
            dims = "[:, None]" if self.nest.reduced_axes else ""
            lines.append(f"x = {program} * {tiling.x_block} + tl.arange(0, {tiling.x_block}){dims}")
        lines += self.masks_and_axes("x", tiling.x_axes, self.x_count, tiling.x_block)
        if not self.nest.reduced_axes:
            numbers = range(len(self.nest.body))
            return lines + [line for n in numbers for line in self.statement(n)]
        lines.append(
            f"r_base = tl.arange(0, {tiling.r_block})[None, :]" + (".to(tl.int64)" if self.wide else "")
        )
        if tiling.persistent:
            return lines + self._persistent()
        for step in self.analysis.passes:
            lines += [line for n in step.before for line in self.statement(n)]
            if step.walks:
                lines += self._looped(step)
        return lines

    def masks_and_axes(self, side: str, axes: Sequence[int], count: int, block: int) -> list[str]:
        """The side's mask, and the index along each of its axes."""
        lines = [f"{side}_inside = {side} < {count}"] if _overhangs(count, block) else []
        below = count
        for axis in axes:
            extent = self.nest.extents[axis]
            below //= max(1, extent)
            if axis not in self.used:
                continue
            index = side if below == 1 else f"{side} // {below}"
            if axis != axes[0]:
                index = f"({index}) % {extent}"
            lines.append(f"i{axis} = {index}")
        return lines

    # ---- reductions -------------------------------------------------------------------------------------

    def _r_axes(self) -> list[str]:
        axes = range(self.parallel, len(self.nest.extents))
        return self.masks_and_axes("r", axes, self.r_count, self.tiling.r_block)

    def _persistent(self) -> list[str]:
        lines = ["r = r_base", *self._r_axes()]
        for n, statement in enumerate(self.nest.body):
            if isinstance(statement, Reduce):
                lines += self._taken(n, statement)
                lines += self._reduced(n, statement, f"e{n}", "r")
            else:
                lines += self.statement(n)
        return lines

    def _looped(self, step: Pass) -> list[str]:
        reductions = [
            (n, s) for n, s in enumerate(self.nest.body) if n in step.reduces and isinstance(s, Reduce)
        ]
        shape = f"[{self.tiling.x_block}, {self.tiling.r_block}]"
        lines = []
        for n, statement in reductions:
            kind = scalar_triton.value_type(self._accumulated(statement))
            lines.append(f"r{n} = tl.full({shape}, {self._identity(statement)}, {kind})")
            if _is_positional(statement):
                lines.append(f"q{n} = tl.full({shape}, 0, tl.int64)")
        loop = ["r = r_start + r_base", *self._r_axes()]
        for n in sorted((*step.values, *step.reduces, *step.stores)):
            statement = self.nest.body[n]
            if isinstance(statement, Reduce):
                loop += self._taken(n, statement)
                loop.append(self._combined(n, statement))
            else:
                loop += self.statement(n)
        lines.append(f"for r_start in range(0, {self.r_count}, {self.tiling.r_block}):")
        lines += [f"    {line}" for line in loop]
        for n, statement in reductions:
            lines += self._reduced(n, statement, f"r{n}", f"q{n}")
        return lines

    def _taken(self, n: int, statement: Reduce) -> list[str]:
        """``e{n}``: the tile of values that a reduction takes, its identity outside of the reduced space."""
        computed = self._accumulated(statement)
        value = scalar_triton.converted(
            f"v{statement.argument}", self.dtypes[statement.argument], _argument_dtype(statement, computed)
        )
        if statement.operation in ("any", "all"):
            value = f"{value}.to(tl.int32)"
        shape = f"[{self.tiling.x_block}, {self.tiling.r_block}]"
        lines = [f"e{n} = tl.broadcast_to({value}, {shape})"]
        if _overhangs(self.r_count, self.tiling.r_block):
            lines.append(f"e{n} = tl.where(r_inside, e{n}, {self._identity(statement)})")
        return lines

    def _combined(self, n: int, statement: Reduce) -> str:
        match statement.operation:
            case "sum":
                return f"r{n} += e{n}"
            case "prod":
                return f"r{n} *= e{n}"
            case "argmax" | "argmin":
                position = f"tl.broadcast_to(r, e{n}.shape).to(tl.int64)"
                function = f"first_{statement.operation[3:]}"
                return f"r{n}, q{n} = {function}(r{n}, q{n}, e{n}, {position})"
            case _:
                return f"r{n} = {self._function(statement)}(r{n}, e{n})"

    def _reduced(self, n: int, statement: Reduce, tile: str, position: str) -> list[str]:
        """``v{n}`` of the tile, ``[X, 1]``."""
        result = scalar_triton.value_type(statement.dtype)
        if statement.operation == "sum":
            return [f"v{n} = tl.sum({tile}, 1, keep_dims=True).to({result})"]
        if _is_positional(statement):
            position = f"tl.broadcast_to({position}, {tile}.shape).to(tl.int64)"
            function = f"first_{statement.operation[3:]}"
            return [f"_, v{n} = tl.reduce(({tile}, {position}), 1, {function}, keep_dims=True)"]
        function = "product" if statement.operation == "prod" else self._function(statement)
        end = " != 0" if statement.dtype == torch.bool else f".to({result})"
        return [f"v{n} = tl.reduce({tile}, 1, {function}, keep_dims=True){end}"]

    def _function(self, statement: Reduce) -> str:
        side = "max" if statement.operation in ("max", "any") else "min"
        floats = self._accumulated(statement).is_floating_point
        return f"nan_{side}" if floats else f"plain_{side}"

    def _accumulated(self, statement: Reduce) -> torch.dtype:
        if statement.operation in ("any", "all"):
            return torch.int32
        if _is_positional(statement):
            return self.dtypes[statement.argument]
        return statement.dtype

    def _identity(self, statement: Reduce) -> str:
        operation, computed = statement.operation, self._accumulated(statement)
        if operation in ("sum", "any"):
            return "0"
        if operation in ("prod", "all"):
            return "1"
        smallest = operation in ("max", "argmax")
        if computed.is_floating_point:
            return "-float('inf')" if smallest else "float('inf')"
        if computed == torch.bool:
            return "0" if smallest else "1"
        limits = torch.iinfo(computed)
        return str(limits.min if smallest else limits.max)

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
                terms = [*_terms(strides), *([str(offset)] if offset else [])]
                return [f"v{n} = ({' + '.join(terms)}).to(tl.int64)"]
            case Apply(arguments=arguments):
                dtypes = [self.dtypes[argument] for argument in arguments]
                expression = scalar_triton.apply(statement, [f"v{a}" for a in arguments], dtypes)
                return [f"v{n} = {expression}"]
            case Reduce():
                return []

    def load(self, n: int, statement: Load) -> list[str]:
        access = statement.access
        varied = _varied(access).union(*(self.analysis.axes[operand] for operand in operands(statement)))
        lines, address, valid = self._address(n, access, varied)
        masks = self._masks(statement.mask, varied) + valid
        memory = self.buffers[access.buffer].dtype
        arguments = [f"p{self.positions[access.buffer]} + {address}"]
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
        value = scalar_triton.stored(f"v{statement.value}", self.dtypes[statement.value], memory)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return [*lines, f"tl.store(p{self.positions[access.buffer]} + {address}, {value}{mask})"]

    def _sides(self) -> tuple[tuple[str, tuple[int, ...], int, int], ...]:
        """Name, axes, indices and block of each side of the tile."""
        tiling = self.tiling
        return (
            ("x", tiling.x_axes, self.x_count, tiling.x_block),
            ("y", tiling.y_axes, self.y_count, tiling.y_block),
            ("r", tuple(range(self.parallel, len(self.nest.extents))), self.r_count, tiling.r_block),
        )

    def _address(self, n: int, access: Access, varied: frozenset[int]) -> tuple[list[str], str, list[str]]:
        """Lines that compute gathered indices, the address, and which of the indices are in range. The
        address has all sides that ``varied`` names, since a mask may not have more of them than it."""
        terms, lines, valid = _terms(access.strides), [], []
        for k, gather in enumerate(access.gathers):
            index = f"x{n}_{k}"
            lines.append(f"{index} = v{gather.value}.to(tl.int64)")
            lines.append(f"{index} = tl.where({index} < 0, {index} + {gather.size}, {index})")
            lines.append(f"{index}_inside = ({index} >= 0) & ({index} < {gather.size})")
            valid.append(f"{index}_inside")
            terms.append(f"{index} * {gather.stride}")
        own = _varied(access).union(*(self.analysis.axes[gather.value] for gather in access.gathers))
        for side, axes, _, _ in self._sides():
            if varied & set(axes) and not own & set(axes):
                terms.append(f"{side} * 0")
        if access.offset or not terms:
            terms.append(str(access.offset))
        return lines, f"({' + '.join(terms)})", valid

    def _masks(self, mask: int | None, varied: frozenset[int]) -> list[str]:
        """The sides' masks that an access needs, and its own."""
        masks = [
            f"{side}_inside"
            for side, axes, count, block in self._sides()
            if _overhangs(count, block) and varied & set(axes)
        ]
        return masks if mask is None else [*masks, f"v{mask}"]


def _varied(access: Access) -> frozenset[int]:
    return frozenset(axis for axis, stride in enumerate(access.strides) if stride)


def _overhangs(count: int, block: int) -> bool:
    """Whether the last block of a side reaches beyond it."""
    return count % block != 0 or count == 0


def _terms(strides: Sequence[int]) -> list[str]:
    return [f"i{a}" if stride == 1 else f"i{a} * {stride}" for a, stride in enumerate(strides) if stride]


def _walks(nest: LoopNest) -> list[tuple[int, tuple[int, ...]]]:
    """Offset and strides of every access and every position."""
    walks = [(s.access.offset, s.access.strides) for s in nest.body if isinstance(s, Load | Store)]
    return walks + [(s.offset, s.strides) for s in nest.body if isinstance(s, Position)]


def _needs_int64(nest: LoopNest) -> bool:
    """Whether a flat index or an address may leave the range of int32, the last block's overhang included."""
    margin = 1 << 20
    if prod(nest.extents) > _LARGEST_INT32 - margin:
        return True
    for offset, strides in _walks(nest):
        reach = abs(offset)
        reach += sum(abs(stride) * extent for stride, extent in zip(strides, nest.extents, strict=True))
        if reach > _LARGEST_INT32 - margin:
            return True
    return False


def _is_positional(statement: Reduce) -> bool:
    return statement.operation in ("argmax", "argmin")


def _argument_dtype(statement: Reduce, computed: torch.dtype) -> torch.dtype:
    return torch.bool if statement.operation in ("any", "all") else computed
