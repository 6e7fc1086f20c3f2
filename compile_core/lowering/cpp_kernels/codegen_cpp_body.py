"""The C++ of statements and of loops around them: what is inside one pass of a kernel.

A statement goes into the outermost loop in which every axis that it varies over is bound. Names are fixed:
``v{n}`` is statement ``n``'s value, ``a{n}`` an array of such values over the unit's columns, ``k{n}`` a
scratch array over all points of a unit, ``i{axis}`` an index, ``p{k}`` the pointer of buffer ``k``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    Gather,
    Load,
    Position,
    Reduce,
    Statement,
    Store,
    operands,
)
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, compute_dtype
from gradsplit.compile_core.lowering.cpp_kernels import scalar_cpp
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp_reductions import CppReduction
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes
from gradsplit.compile_core.lowering.nests.passes import NestAnalysis, stored_buffers, value_dtypes
from gradsplit.compile_core.lowering.tiling.tiling_cpp import CpuTiling, axes_apart, is_transposed

# What combines a value with an element of memory.
_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class Loop:
    """A loop, or (``axis`` is ``None``) a block of statements around the loops that follow.

    Attributes:
        axis: the axis whose index it binds.
        header: ``for (...) {`` or ``{``.
        opening, closing: what stands first and last in it.
    """

    axis: int | None
    header: str
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()


def axis_loop(axis: int, start: str, stop: str) -> Loop:
    return Loop(axis, f"for (int64_t i{axis} = {start}; i{axis} < {stop}; ++i{axis}) {{")


class BodyWriter:
    """Writes statements of one nest for one tiling.

    Attributes:
        by_column: whether the nest reduces but its vectorised axis is parallel.
        columns: how many indices of that axis a unit has.
        scratch_points: how many points a unit has in one pass.
    """

    def __init__(
        self,
        analysis: NestAnalysis,
        tiling: CpuTiling,
        buffers: Mapping[str, TensorSpec],
        pointers: Mapping[str, int],
    ) -> None:
        self.nest = analysis.nest
        self.analysis = analysis
        self.tiling = tiling
        self.buffers = buffers
        self.pointers = pointers
        self.parallel = parallel_axes(self.nest)
        vector = tiling.vector_axis
        self.by_column = bool(self.nest.reduced_axes) and vector is not None and vector < self.parallel
        self.columns = tiling.blocks[vector] if self.by_column and vector is not None else 1
        self.dtypes = value_dtypes(self.nest)
        in_scalars = bool(self.nest.reduced_axes) and not self.by_column
        one_by_one = in_scalars and not all(map(self._has_vector_form, range(len(self.nest.body))))
        self.reductions = {
            n: CppReduction(n, statement, self._accumulated_dtype(statement), self.by_column, one_by_one)
            for n, statement in enumerate(self.nest.body)
            if isinstance(statement, Reduce)
        }
        self.stored = stored_buffers(self.nest)
        self.staged = self._staged()
        self._apart = axes_apart(self.nest)

    def _staged(self) -> dict[int, tuple[int, str]]:
        """Loads of a transposing nest that go through a copy of their tile: the contiguous axis, and the
        element."""
        axis, vector = self.tiling.tiled_axis, self.tiling.vector_axis
        if axis is None or vector is None:
            return {}
        staged = {}
        for n, statement in enumerate(self.nest.body):
            if not isinstance(statement, Load) or statement.mask is not None or statement.access.gathers:
                continue
            if is_transposed(statement.access, axis, vector):
                staged[n] = (axis, self._element(n, statement.access, "true", str)[1])
        return staged

    def access(self, n: int) -> Access:
        """The access of a load or store."""
        statement = self.nest.body[n]
        if not isinstance(statement, Load | Store):
            raise InternalError(f"statement {n} accesses no buffer")
        return statement.access

    def staged_element(self, n: int) -> str:
        """The current position in the copy of a tile."""
        axis, vector = self.tiling.tiled_axis, self.tiling.vector_axis
        if axis is None or vector is None:
            raise InternalError("no tile is staged")
        return f"s{n}[(i{axis} - low{axis}) * {self.tiling.blocks[vector]} + i{vector} - low{vector}]"

    def is_fixed(self, value: int) -> bool:
        """Whether a value is one scalar a unit, given that it does not vary over the reduced axes."""
        return not self.by_column or self.tiling.vector_axis not in self.analysis.axes[value]

    def in_array(self, value: int) -> bool:
        """By column: whether a value of the parallel axes is computed once a unit, not once a row."""
        if not self.by_column:
            return False
        if value in self.reductions:
            return True
        statement = self.nest.body[value]
        # A load can be repeated, unless a store comes in between.
        overwritten = isinstance(statement, Load) and statement.access.buffer in self.stored
        worthwhile = isinstance(statement, Apply) or overwritten
        return worthwhile and not self.analysis.walks_with(value) and not self.is_fixed(value)

    def fixed(self, numbers: Sequence[int]) -> list[str]:
        """Statements outside all loops of a unit."""
        arrays = {n: f"a{n}[0]" for n in self.reductions} if self.by_column else {}
        return [line for n in numbers for line in self.statement(n, arrays)]

    def section(
        self, numbers: Sequence[int], loops: Sequence[Loop], tail: Sequence[str], kept: Sequence[int]
    ) -> list[str]:
        """Statements in nested loops.

        Args:
            numbers: the statements, in order; whatever else they read is in scope already.
            loops: outermost first.
            tail: lines that end the innermost loop.
            kept: values to read back from scratch arrays.
        """
        numbers = self._with_repeated(numbers)
        innermost = len(loops)
        placed: list[list[str]] = [[] for _ in range(innermost + 1)]
        for n in kept:
            kind = scalar_cpp.value_type(self.dtypes[n])
            placed[innermost].append(f"const {kind} v{n} = k{n}[{self.scratch_index()}];")
        _, array_values = self.read_from_outside(numbers, kept)
        arrays = {n: f"a{n}[{self.column()}]" for n in array_values}
        depths = dict.fromkeys(kept, innermost)
        for n in numbers:
            read_here = operands(self.nest.body[n])
            depth = max(
                (i + 1 for i, loop in enumerate(loops) if loop.axis in self.analysis.axes[n]), default=0
            )
            depth = max([depth, *(depths.get(operand, 0) for operand in read_here)])
            if n in self.reductions or any(operand in arrays for operand in read_here):
                depth = innermost
            depths[n] = depth
            placed[depth] += self.statement(n, arrays)
        placed[innermost] += tail
        return self._nested(loops, placed, self._pragma(numbers))

    def read_from_outside(
        self, numbers: Sequence[int], kept: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """The unit's values that statements read, apart from ``kept`` ones: scalars, and elements of
        arrays."""
        numbers = self._with_repeated(numbers)
        read = {operand for n in numbers for operand in operands(self.nest.body[n])} - {*numbers, *kept}
        arrays = sorted(n for n in read if self.in_array(n))
        return sorted(read - set(arrays)), arrays

    def _with_repeated(self, numbers: Sequence[int]) -> list[int]:
        """Adds the loads of a column that an array would not make cheaper: they are repeated where they are
        used."""
        wanted = set(numbers)
        pending = list(numbers) if self.by_column else []
        while pending:
            for n in operands(self.nest.body[pending.pop()]):
                if n in wanted or self.analysis.walks_with(n) or self.is_fixed(n) or self.in_array(n):
                    continue
                wanted.add(n)
                pending.append(n)
        return sorted(wanted)

    def _nested(self, loops: Sequence[Loop], placed: list[list[str]], pragma: str) -> list[str]:
        lines = ["{", *placed[0]]
        for depth, loop in enumerate(loops):
            if (
                depth == len(loops) - 1
                and loop.axis is not None
                and loop.axis == self.tiling.vector_axis
                and pragma
            ):
                lines.append(pragma)
            lines += [loop.header, *loop.opening, *placed[depth + 1]]
        for loop in reversed(loops):
            lines += [*loop.closing, "}"]
        return [*lines, "}"]

    def _pragma(self, numbers: Sequence[int]) -> str:
        reductions = [] if self.by_column else [self.reductions[n] for n in numbers if n in self.reductions]
        if any(reduction.is_positional for reduction in reductions):
            return ""
        if self.tiling.vector_axis not in self._apart and any(map(self._combines_in_loop, numbers)):
            return ""
        clauses = "".join(reduction.simd_clauses() for reduction in reductions)
        checks = any(_gathers(self.nest.body[n]) for n in numbers)
        return f"#pragma omp simd{clauses}{' reduction(|: bad)' if checks else ''}"

    def _combines_in_loop(self, n: int) -> bool:
        """Whether a statement combines values with memory at every point along the vectorised axis."""
        statement = self.nest.body[n]
        combines = isinstance(statement, Store) and statement.reduction is not None
        return combines and self.tiling.vector_axis in self.analysis.axes[n]

    def _is_of_truth_values(self, value: int) -> bool:
        """Whether an integer is computed from truth values, not only chosen by them."""
        statement = self.nest.body[value]
        if not isinstance(statement, Apply):
            return False
        numbers = [n for n in statement.arguments if self.dtypes[n] != torch.bool]
        if statement.operation == "cast" and not numbers:
            return True
        if numbers and all(isinstance(self.nest.body[n], Constant) for n in numbers):
            return True
        return any(map(self._is_of_truth_values, numbers))

    # ---- single statements ------------------------------------------------------------------------------

    def statement(self, n: int, arrays: Mapping[int, str]) -> list[str]:
        """The lines of one statement; ``arrays`` says which operands are elements of arrays."""

        def value(operand: int) -> str:
            return arrays.get(operand, f"v{operand}")

        statement = self.nest.body[n]
        name = f"const {scalar_cpp.value_type(self.dtypes[n])} v{n}"
        match statement:
            case Load():
                return self._load(n, statement, name, value)
            case Store():
                return self._store(n, statement, value)
            case Constant():
                return [f"{name} = {scalar_cpp.literal(statement.value, statement.dtype)};"]
            case Position(strides=strides, offset=offset):
                return [f"{name} = {' + '.join(_terms(offset, strides)) or '0'};"]
            case Apply(arguments=arguments):
                dtypes = [self.dtypes[argument] for argument in arguments]
                return [f"{name} = {scalar_cpp.apply(statement, [value(a) for a in arguments], dtypes)};"]
            case Reduce(argument=argument):
                reduction = self.reductions[n]
                element = scalar_cpp.converted(value(argument), self.dtypes[argument], reduction.computed)
                at = f"[{self.column()}]" if self.by_column else ""
                return [
                    f"const {scalar_cpp.value_type(reduction.computed)} e{n} = {element};",
                    reduction.step(f"e{n}", at, f"i{len(self.nest.extents) - 1}"),
                ]

    def _load(self, n: int, statement: Load, name: str, value: Callable[[int], str]) -> list[str]:
        dtype = self.buffers[statement.access.buffer].dtype
        active = "true" if statement.mask is None else value(statement.mask)
        lines, element = self._element(n, statement.access, active, value)
        if n in self.staged:
            element = self.staged_element(n)
        read = scalar_cpp.converted(scalar_cpp.loaded(element, dtype), compute_dtype(dtype), statement.dtype)
        if statement.mask is not None:
            read = f"{active} ? {read} : {scalar_cpp.literal(statement.other, statement.dtype)}"
        return [*lines, f"{name} = {read};"]

    def _store(self, n: int, statement: Store, value: Callable[[int], str]) -> list[str]:
        dtype = self.buffers[statement.access.buffer].dtype
        active = "true" if statement.mask is None else value(statement.mask)
        lines, element = self._element(n, statement.access, active, value)
        kind = self.dtypes[statement.value]
        written = scalar_cpp.stored(value(statement.value), kind, dtype)
        if statement.reduction is not None:
            held = scalar_cpp.converted(element, dtype, kind)
            combine = Apply(_COMBINE[statement.reduction], (n, statement.value), kind)
            both = scalar_cpp.apply(combine, [held, value(statement.value)], [kind, kind])
            written = scalar_cpp.stored(f"({both})", kind, dtype)
        guard = "" if statement.mask is None else f"if ({active}) "
        return [*lines, f"{guard}{element} = {written};"]

    def _element(
        self, n: int, access: Access, active: str, value: Callable[[int], str]
    ) -> tuple[list[str], str]:
        """Lines that check gathered indices, and the memory element. Checks stay outside conditions, so that
        these can become masks."""
        terms = _terms(access.offset, access.strides)
        lines = []
        for k, gather in enumerate(access.gathers):
            index = self.checked(gather, value(gather.value), active)
            lines.append(f"const int64_t x{n}_{k} = {index};")
            terms.append(f"x{n}_{k} * {gather.stride}LL")
        return lines, f"p{self.pointers[access.buffer]}[{' + '.join(terms) or '0'}]"

    def checked(self, gather: Gather, value: str, active: str) -> str:
        """A gathered index, 0 where it is out of range."""
        chosen = f"int64_t({value})"
        if self._is_of_truth_values(gather.value):
            chosen = f"not_of_a_vector({chosen})"
        function = "wrapped_index" if gather.wraps else "checked_index"
        return f"{function}({chosen}, {gather.size}LL, {active}, bad)"

    def column(self) -> str:
        """The current position in arrays over the unit's columns."""
        return f"i{self.tiling.vector_axis} - low{self.tiling.vector_axis}"

    def scratch_index(self) -> str:
        """The current position in scratch arrays over the unit's points."""
        index = "0"
        for axis in range(self.parallel, len(self.nest.extents)):
            index = f"i{axis}" if index == "0" else f"({index}) * {self.nest.extents[axis]} + i{axis}"
        return f"({index}) * {self.columns} + {self.column()}" if self.by_column else index

    def _has_vector_form(self, n: int) -> bool:
        """Whether g++ is known to vectorise a loop over the vectorised axis with this statement in it."""
        statement = self.nest.body[n]
        if self.tiling.vector_axis not in self.analysis.axes[n]:
            return True
        if isinstance(statement, Apply):
            dtypes = [self.dtypes[argument] for argument in statement.arguments]
            return scalar_cpp.has_vector_form(statement, dtypes)
        return not _gathers(statement)

    def _accumulated_dtype(self, statement: Reduce) -> torch.dtype:
        if statement.operation in ("any", "all"):
            return torch.bool
        if statement.operation in ("argmax", "argmin"):
            return self.dtypes[statement.argument]
        return statement.dtype


def _terms(offset: int, strides: Sequence[int]) -> list[str]:
    terms = [str(offset)] if offset else []
    for axis, stride in enumerate(strides):
        if stride:
            terms.append(f"i{axis}" if stride == 1 else f"i{axis} * {stride}LL")
    return terms


def _gathers(statement: Statement) -> bool:
    return isinstance(statement, Load | Store) and bool(statement.access.gathers)
