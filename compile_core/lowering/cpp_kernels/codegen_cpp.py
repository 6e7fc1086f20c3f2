"""C++ source of a loop nest: loops, OpenMP, and vectorisation by g++.

The shape of a kernel is that of ``tiling_cpp.py``: a parallel loop over units; in a unit, the passes of
``passes.py``; in a pass, loops over the axes that the unit covers, the vectorised one innermost. Each value
is computed in the outermost loop in which all axes it varies over are bound. What crosses from one pass to
the next is a scalar, or, where it varies over the vectorised axis, an array on the stack.

    for unit in units (threads share them)
        values of the parallel axes                          "before" of pass 0
        accumulators
        for r0 ... for r1 (simd) { loads, arithmetic, accumulate }        pass 0
        values that follow from the reductions               "before" of pass 1
        for r0 ... for r1 (simd) { loads, arithmetic, store }             pass 1

When the vectorised axis is parallel ("by column"), accumulators are arrays over a block of columns and the
vectorised loop stays innermost, inside the reduced ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.compile_core.ir.loops import LoopNest, Store
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp_body import BodyWriter, Loop, axis_loop
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp_reductions import CppReduction
from gradsplit.compile_core.lowering.cpp_kernels.scalar_cpp import memory_type, value_type
from gradsplit.compile_core.lowering.nests.live_statements import needed_statements
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, points, simplify
from gradsplit.compile_core.lowering.nests.passes import (
    NestPass,
    analyse,
    buffers_of,
    statement_cost,
    stored_buffers,
)
from gradsplit.compile_core.lowering.tiling.tiling_cpp import tile_for_cpu

# What a unit may keep on its stack for later passes, half of a usual second-level cache.
_SCRATCH_BYTES = 256 * 1024
# Points that one block accumulator takes before it is added to the total: those of a row in eight or sixteen
# interleaved sums.
_ROW_BLOCK = 512
_COLUMN_BLOCK_ROWS = 64
# Below this cost a kernel is shorter than releasing and retaking the interpreter's lock is worth.
LONG_KERNEL_COST = 1 << 19


def generate_cpp(nest: LoopNest, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """C++ for one nest over CPU buffers.

    Args:
        nest: a valid nest.
        buffers: specs of at least the buffers that it names.

    Raises:
        Unsupported: a dtype that C++ kernels do not handle (complex, quantised).
    """
    names = buffers_of(nest)
    simple = simplify(nest)
    pointers = tuple(
        pointer(index, buffers[name].dtype, name in stored_buffers(nest)) for index, name in enumerate(names)
    )
    body = _NestWriter(simple, buffers, {name: index for index, name in enumerate(names)}, pointers).lines()
    cost = points(simple) * sum(statement_cost(statement) for statement in simple.body)
    parts = (
        f"static int {KERNEL_SYMBOL}_loops({parameters(pointers)}) {{",
        *(f"  {line}" for line in body),
        "}",
        *entry_function(
            len(pointers),
            ", ".join(f"({one.kind})p[{index}]" for index, one in enumerate(pointers)),
            releases_lock=cost > LONG_KERNEL_COST,
        ),
    )
    return KernelSource(nest.name, "cpp", "\n".join(parts), names, torch.device("cpu"))


@dataclass(frozen=True)
class Variable:
    """Something that a function of the kernel takes by value. Loops must not see variables that a lambda
    captured: g++ reads those anew in every iteration, and gathers what it would load."""

    kind: str
    name: str


def pointer(index: int, dtype: torch.dtype, is_written: bool) -> Variable:
    """The variable that has the address of a kernel's buffer."""
    return Variable(f"{'' if is_written else 'const '}{memory_type(dtype)} *", f"p{index}")


def parameters(variables: Sequence[Variable]) -> str:
    """Declares them; the memory of pointers does not overlap."""
    return ", ".join(f"{v.kind}{'__restrict ' if v.kind.endswith('*') else ' '}{v.name}" for v in variables)


def _called_in_parallel(
    function: str, count: int, grain: int, variables: Sequence[Variable], lines: Sequence[str]
) -> tuple[list[str], str]:
    """A function of a range and of ``variables``, and the expression that runs it over ``[0, count)``."""
    given = (Variable("int64_t", "begin"), Variable("int64_t", "end"), *variables)
    definition = [f"auto {function} = []({parameters(given)}) -> int {{", *lines, "};"]
    arguments = ", ".join(v.name for v in given)
    body = f"[&](int64_t begin, int64_t end) {{ return {function}({arguments}); }}"
    return definition, f"parallel_ranges({count}, {grain}, {body})"


def entry_function(count: int, arguments: str, releases_lock: bool) -> list[str]:
    """What runs the kernel given an array of addresses, and the function that Python calls with ``count`` buffers.

    Args:
        arguments: what the kernel's loops take, of ``p``, the array of the buffers' addresses.
        releases_lock: whether other threads may run Python meanwhile.
    """
    call = f"  int status = {KERNEL_SYMBOL}_run(p);"
    unlocked = ["  void *state = PyEval_SaveThread();", call, "  PyEval_RestoreThread(state);"]
    return [
        f"static int {KERNEL_SYMBOL}_run(void **p) {{ return {KERNEL_SYMBOL}_loops({arguments}); }}",
        f"static PyObject *{KERNEL_SYMBOL}_call(PyObject *, PyObject *const *arguments, intptr_t given) {{",
        f"  void *p[{max(1, count)}];",
        f"  if (!read_pointers(arguments, given, {count}, p)) return nullptr;",
        *(unlocked if releases_lock else [call]),
        "  return finished(status);",
        "}",
        f'extern "C" KernelDefinition {KERNEL_SYMBOL} = '
        f'{{{{"{KERNEL_SYMBOL}", {KERNEL_SYMBOL}_call, METH_FASTCALL_FLAG, nullptr}}, {KERNEL_SYMBOL}_run}};',
    ]


class _NestWriter:
    """Writes the units and passes of one kernel."""

    def __init__(
        self,
        nest: LoopNest,
        buffers: Mapping[str, TensorSpec],
        positions: Mapping[str, int],
        pointers: Sequence[Variable],
    ) -> None:
        self.nest = nest
        self.pointers = pointers
        self.tiling = tile_for_cpu(nest)
        self.parallel = parallel_axes(nest)
        vector = self.tiling.vector_axis
        block = self.tiling.blocks[vector] if vector is not None and vector < self.parallel else 1
        self.scratch_points = max(1, prod(nest.extents[self.parallel :]) * block)
        keep_limit = _SCRATCH_BYTES // (4 * self.scratch_points) if self.tiling.split_axis is None else 0
        self.analysis = analyse(nest, keep_limit)
        self.body = BodyWriter(self.analysis, self.tiling, buffers, positions)

    def lines(self) -> list[str]:
        """The body of the kernel's function, which returns whether an index was out of range."""
        if 0 in self.nest.extents[: self.parallel]:
            return ["return 0;"]
        extents, tiling = self.nest.extents[: self.parallel], self.tiling
        counts = [-(-extent // block) for extent, block in zip(extents, tiling.blocks, strict=True)]
        unit = [f"    {line}" for line in (*self._unit_ranges(counts), *self._own_units(), *self._unit())]
        units, shared = prod(counts), prod(counts[axis] for axis in tiling.apart)
        first, end = (edge if shared == units else f"{edge} * {units // shared}" for edge in ("begin", "end"))
        if tiling.owner is not None:
            first, end, shared = "0", str(units), tiling.owner.size
        loop = [
            "  int bad = 0;",
            f"  for (int64_t unit = {first}; unit < {end}; ++unit) {{",
            *unit,
            "  }",
            "  return bad;",
        ]
        if tiling.split_axis is not None:  # its passes are parallel inside, so its units are not
            return [f"  const int64_t begin = 0, end = {units};", *loop]
        definition, call = _called_in_parallel("units", shared, tiling.grain, self.pointers, loop)
        return [*definition, f"return {call};"]

    def _own_units(self) -> list[str]:
        """Leaves out the units of other threads, where they share the range of an index."""
        owner = self.tiling.owner
        if owner is None:
            return []
        lines = self.body.fixed(needed_statements(self.nest.body, [owner.value]))
        return [
            "int64_t owned;",
            "{",
            *lines,
            f"owned = {self.body.checked(owner, f'v{owner.value}', 'true')};",
            "}",
            "if (owned < begin || owned >= end) continue;",
        ]

    def _unit_ranges(self, counts: Sequence[int]) -> list[str]:
        """Which indices of the parallel axes a unit covers."""
        lines = []
        rest = "unit"
        apart = self.tiling.apart
        order = [*apart, *(axis for axis in range(self.parallel) if axis not in apart)]
        for place, axis in reversed(list(enumerate(order))):
            position = "int64_t(0)"
            if counts[axis] > 1:
                outermost = all(counts[outer] == 1 for outer in order[:place])
                position = rest if outermost else f"({rest}) % {counts[axis]}"
                rest = f"({rest}) / {counts[axis]}"
            block, extent = self.tiling.blocks[axis], self.nest.extents[axis]
            if block == 1:
                lines.append(f"const int64_t i{axis} = {position};")
                continue
            stop = f"low{axis} + {block}"
            if extent % block:
                stop = f"{stop} < {extent} ? {stop} : {extent}"
            lines += [
                f"const int64_t low{axis} = ({position}) * {block};",
                f"const int64_t high{axis} = {stop};",
            ]
        return lines

    def _unit(self) -> list[str]:
        lines: list[str] = []
        for step in self.analysis.passes:
            for n in step.keeps:
                lines.append(f"alignas(64) {value_type(self.body.dtypes[n])} k{n}[{self.scratch_points}];")
        lines += self._staged_tiles()
        for step in self.analysis.passes:
            lines += self._before(step)
            if step.walks:
                lines += self._pass(step)
        return lines

    def _staged_tiles(self) -> list[str]:
        """Copies of what a transposing nest loads, turned over in the first-level cache: read along their
        contiguous axis, stored element by element, so that the vectorised loop reads them along its own."""
        lines = []
        for n, (axis, element) in self.body.staged.items():
            kind = memory_type(self.body.buffers[self.body.access(n).buffer].dtype)
            lines.append(f"alignas(64) {kind} s{n}[{prod(self.tiling.blocks)}];")
            outer = [loop for loop in self._block_loops() if loop.axis != axis]
            inner = axis_loop(axis, f"low{axis}", f"high{axis}")
            lines += [loop.header for loop in (*outer, inner)]
            lines += [f"{self.body.staged_element(n)} = {element};", "}", "}"]
        return lines

    def _before(self, step: NestPass) -> list[str]:
        """Values of the parallel axes that a pass and its successors read, and stores of such values."""
        fixed = [n for n in step.before if self.body.is_fixed(n)]
        arrays = [n for n in step.before if self.body.in_array(n)]
        columns = [n for n in step.before if n not in fixed and isinstance(self.nest.body[n], Store)]
        lines = self.body.fixed(fixed)
        for n in arrays:
            lines.append(f"alignas(64) {value_type(self.body.dtypes[n])} a{n}[{self.body.columns}];")
        if arrays or columns:
            tail = [f"a{n}[{self.body.column()}] = v{n};" for n in arrays]
            lines += self.body.section(sorted((*arrays, *columns)), self._block_loops(), tail, ())
        return lines

    def _pass(self, step: NestPass) -> list[str]:
        reductions = [self.body.reductions[n] for n in step.reduces]
        lines: list[str] = []
        for reduction in reductions:
            lines += reduction.declare("t", self.body.columns)
        if self.tiling.split_axis is None:
            lines += self._walk(step, reductions, self._reduced_bounds())
        else:
            lines += self._split_walk(step, reductions, self.tiling.split_axis)
        for reduction in reductions:
            n, kind = reduction.number, value_type(reduction.statement.dtype)
            if self.body.by_column:
                lines.append(f"alignas(64) {kind} a{n}[{self.body.columns}];")
                lines.append(self._each_column(f"a{n}[c] = {reduction.result('[c]')};"))
            else:
                lines.append(f"const {kind} v{n} = {reduction.result('')};")
        return lines

    def _walk(
        self, step: NestPass, reductions: Sequence[CppReduction], bounds: Sequence[tuple[int, str, str]]
    ) -> list[str]:
        """The loops of a pass over the reduced axes within ``bounds`` and the unit's blocks."""
        numbers = sorted((*step.values, *step.reduces, *step.stores))
        tail = [f"k{n}[{self.body.scratch_index()}] = v{n};" for n in step.keeps]
        reduced = [axis_loop(*bound) for bound in bounds]
        if not reductions:
            loops = [*self._block_loops(), *reduced]
            loops.sort(key=lambda loop: loop.axis == self.tiling.vector_axis)
            return self.body.section(numbers, loops, tail, step.kept)
        depth, rows = len(bounds) - 1, _ROW_BLOCK
        if self.body.by_column:
            rows = _COLUMN_BLOCK_ROWS
            while depth > 0 and prod(self.nest.extents[axis] for axis, _, _ in bounds[depth - 1 :]) <= rows:
                depth -= 1
        block, inner = self._accumulator_block(bounds[depth], rows, reductions)
        loops = [*reduced[:depth], block, inner, *reduced[depth + 1 :], *self._block_loops()]
        return self.body.section(numbers, loops, tail, step.kept)

    def _accumulator_block(
        self, bound: tuple[int, str, str], rows: int, reductions: Sequence[CppReduction]
    ) -> tuple[Loop, Loop]:
        """A loop over blocks of one axis, each with accumulators of its own, and the loop inside a block."""
        axis, start, stop = bound
        columns = self.body.columns
        opening = [line for reduction in reductions for line in reduction.declare("r", columns)]
        at = "[c]" if self.body.by_column else ""
        flushes = [r.flush(f"r{r.number}{at}", f"q{r.number}{at}", at) for r in reductions]
        closing = (self._each_column(" ".join(flushes)),) if self.body.by_column else tuple(flushes)
        if self.nest.extents[axis] <= rows:
            return Loop(None, "{", tuple(opening), closing), axis_loop(axis, start, stop)
        header = f"for (int64_t from{axis} = {start}; from{axis} < {stop}; from{axis} += {rows}) {{"
        end = f"from{axis} + {rows}"
        opening.append(f"const int64_t to{axis} = {end} < {stop} ? {end} : {stop};")
        return Loop(None, header, tuple(opening), closing), axis_loop(axis, f"from{axis}", f"to{axis}")

    def _split_walk(self, step: NestPass, reductions: Sequence[CppReduction], axis: int) -> list[str]:
        """A pass whose chunks run in parallel; their totals are combined in the chunks' order."""
        extent, chunks, columns = self.nest.extents[axis], self.tiling.chunks, self.body.columns
        at, partial = ("[c]", f"[chunk * {columns} + c]") if self.body.by_column else ("", "[chunk]")
        lines, chunk, saves, combine = [], [], [], []
        partial_results = []
        for reduction in reductions:
            n, second = reduction.number, reduction.second_type
            lines.append(f"alignas(64) {reduction.total_type} part{n}[{chunks * columns}];")
            partial_results.append(Variable(f"{reduction.total_type} *", f"part{n}"))
            saves.append(f"part{n}{partial} = t{n}{at};")
            if second:
                lines.append(f"alignas(64) {second} mark{n}[{chunks * columns}];")
                partial_results.append(Variable(f"{second} *", f"mark{n}"))
                saves.append(f"mark{n}{partial} = u{n}{at};")
            chunk += reduction.declare("t", columns)
            combine.append(reduction.flush(f"part{n}{partial}", f"mark{n}{partial}", at))
        chunk.append(f"const int64_t first = {extent}LL * chunk / {chunks};")
        chunk.append(f"const int64_t past = {extent}LL * (chunk + 1) / {chunks};")
        bounds = [(a, "first", "past") if a == axis else (a, s, e) for a, s, e in self._reduced_bounds()]
        chunk += self._walk(step, reductions, bounds)
        chunk.append(self._each_column(" ".join(saves)))
        body = [
            "  int bad = 0;",
            "  for (int64_t chunk = begin; chunk < end; ++chunk) {",
            *(f"    {line}" for line in chunk),
            "  }",
            "  return bad;",
        ]
        function = f"pass_{min((*step.reduces, *step.stores))}"
        definition, call = _called_in_parallel(
            function, chunks, 1, [*self._outer_variables(step), *partial_results], body
        )
        combined = (
            f"for (int64_t chunk = 0; chunk < {chunks}; ++chunk) {self._each_column(' '.join(combine))}"
        )
        return [*lines, *definition, f"bad |= {call};", combined]

    def _outer_variables(self, step: NestPass) -> list[Variable]:
        """What a pass reads of the unit around it."""
        variables = list(self.pointers)
        for axis in range(self.parallel):
            names = (f"i{axis}",) if self.tiling.blocks[axis] == 1 else (f"low{axis}", f"high{axis}")
            variables += [Variable("int64_t", name) for name in names]
        scalars, arrays = self.body.read_from_outside((*step.values, *step.reduces, *step.stores))
        variables += [Variable(value_type(self.body.dtypes[n]), f"v{n}") for n in scalars]
        return variables + [Variable(f"const {value_type(self.body.dtypes[n])} *", f"a{n}") for n in arrays]

    def _each_column(self, statements: str) -> str:
        if not self.body.by_column:
            return f"{{ {statements} }}"
        return f"for (int64_t c = 0; c < {self.body.columns}; ++c) {{ {statements} }}"

    def _reduced_bounds(self) -> list[tuple[int, str, str]]:
        return [
            (axis, "0", str(extent)) for axis, extent in enumerate(self.nest.extents) if axis >= self.parallel
        ]

    def _block_loops(self) -> list[Loop]:
        """Loops over the parallel axes of which a unit covers a block, the vectorised one innermost."""
        axes = [axis for axis in range(self.parallel) if self.tiling.blocks[axis] > 1]
        axes.sort(key=lambda axis: axis == self.tiling.vector_axis)
        return [axis_loop(axis, f"low{axis}", f"high{axis}") for axis in axes]
