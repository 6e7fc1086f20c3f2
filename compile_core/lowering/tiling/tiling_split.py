"""Two kernels for a reduction that one kernel would run on a few processors of a GPU.

The column sums of a tall matrix, which every bias gradient needs, have as many parallel points as there are
columns: a few dozen programs on a hundred processors. Such a nest becomes two. The first has one more
parallel axis, the number of a chunk of the reduced space, and stores partial results; the second reduces
those and does what followed. There are no atomics: results are the same in every run. (CPU kernels split
inside one kernel, see ``tiling_cpp.py``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    BandNest,
    Constant,
    Load,
    LoopNest,
    LoopProgram,
    Position,
    Reduce,
    Statement,
    Step,
    Store,
)
from gradsplit.compile_core.ir.step_effects import reads
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.live_statements import needed_statements, regathered, renumbered
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, simplify
from gradsplit.compile_core.lowering.nests.passes import NestAnalysis, analyse, buffers_of, stored_buffers
from gradsplit.compile_core.lowering.tiling.one_walk_variances import (
    has_deviations,
    one_walk_variances,
    sum_beside,
)
from gradsplit.compile_core.lowering.tiling.tiling_rounds import has_several_rounds, split_rounds
from gradsplit.compile_core.lowering.tiling.tiling_triton import GpuTiling, tile_for_gpu

_ENOUGH_PROGRAMS = 128
# Programs enough for all processors; more of them where each still has this much to do: measured on column sums, alone
# and after an activation's gradient, of 6 to 50 million elements. Four times as many cost half as much again.
_LEAST_PROGRAMS, _MOST_PROGRAMS = 512, 1536
_POINTS_OF_A_PROGRAM = 1 << 14
_SHORTEST_CHUNK = 64
_LEAST_POINTS = 1 << 16
# One kernel sums columns as short as this no slower than several that use all processors.
_SHORT_COLUMNS = 1024
# Below this, starting more kernels costs more than idle processors do.
_LEAST_POINTS_FOR_ROUNDS = 1 << 18


def split_reductions(program: LoopProgram) -> LoopProgram:
    """An equivalent program in which GPU reductions with too few parallel points are two nests each."""
    buffers = dict(program.buffers)
    steps: list[Step] = []
    partial = {name for step in program.steps if isinstance(step, BandNest) for _, name in step.sums}
    for step in program.steps:
        if isinstance(step, LoopNest) and not reads(step) & partial:
            nests, partials = split_nest(step, buffers)
            buffers.update(partials)
            steps += nests
        else:
            steps.append(step)
    return replace(program, buffers=buffers, steps=tuple(steps))


def split_nest(
    nest: LoopNest, buffers: Mapping[str, TensorSpec]
) -> tuple[tuple[LoopNest, ...], dict[str, TensorSpec]]:
    """The nest itself, or two nests in its place, and the specs of the buffers between them."""
    devices = {buffers[name].device for name in buffers_of(nest)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return (nest,), {}
    simple = simplify(nest)
    device = next(iter(devices))
    if not simple.reduced_axes or _overwrites_what_it_reads(simple):
        return (nest,), {}
    if not tile_for_gpu(simple).persistent and _exact_chunks(simple):
        simple = one_walk_variances(simple)
        nest = simple if has_deviations(simple) else nest
    if not _leaves_processors_idle(simple):
        return (nest,), {}
    rounds, specs = ((simple,), {})
    analysis = analyse(simple, 0)
    if has_several_rounds(analysis) and prod(simple.extents) >= _LEAST_POINTS_FOR_ROUNDS:
        rounds, specs = split_rounds(simple, buffers, device)
    nests: list[LoopNest] = []
    for part in rounds:
        parts, partials = _in_parts(part, device)
        nests += parts
        specs = {**specs, **partials}
    return (tuple(nests), specs) if len(nests) > 1 else ((nest,), {})


def _in_parts(nest: LoopNest, device: torch.device) -> tuple[list[LoopNest], dict[str, TensorSpec]]:
    """A round of reductions as nests, each of which cuts one axis: few images may leave most of it to the next axis."""
    chunks = _chunks(nest)
    if chunks < 2:
        return [nest], {}
    split = ReductionSplit(nest, chunks, device)
    first, specs = [split.first()], split.partial_specs()
    rest = simplify(first[0])
    if rest.reduced_axes and _has_few_programs(rest):
        first, partials = _in_parts(rest, device)
        specs = {**specs, **partials}
    return [*first, split.second()], specs


def _leaves_processors_idle(nest: LoopNest) -> bool:
    return prod(nest.extents[parallel_axes(nest) :]) > _SHORT_COLUMNS and _has_few_programs(nest)


def _has_few_programs(nest: LoopNest) -> bool:
    if prod(nest.extents) < _LEAST_POINTS:
        return False
    tile = tile_for_gpu(nest)
    # Programs that have one row at a time have little on its way from memory.
    return _programs(nest, tile) < (_LEAST_PROGRAMS if tile.r_block == 1 else _ENOUGH_PROGRAMS)


def _programs(nest: LoopNest, tile: GpuTiling) -> int:
    return -(-prod(nest.extents[: parallel_axes(nest)]) // tile.x_block)


def _overwrites_what_it_reads(nest: LoopNest) -> bool:
    """Later kernels would read what earlier ones wrote."""
    loaded = {s.access.buffer for s in nest.body if isinstance(s, Load)}
    return bool(loaded & stored_buffers(nest))


def _chunks(nest: LoopNest) -> int:
    """Into how many parts to cut the outermost reduced axis; 1 for not at all."""
    if not nest.reduced_axes or not is_one_round(analyse(nest, 0)):
        return 1
    most, wanted = _wanted_chunks(nest)
    exact = _exact_chunks(nest)
    # An exact divisor near the wanted number needs no masks, which deviations cannot have.
    near = [c for c in exact if wanted * 2 // 3 <= c <= min(most, wanted * 3 // 2)]
    if has_deviations(nest):
        near = near or exact or [1]
    return min(near, key=lambda c: abs(c - wanted)) if near else max(1, wanted)


def _wanted_chunks(nest: LoopNest) -> tuple[int, int]:
    """Into how many parts the outermost reduced axis could be cut, and should be."""
    parallel = parallel_axes(nest)
    longest = nest.extents[parallel]
    most = min(longest, longest * prod(nest.extents[parallel + 1 :]) // _SHORTEST_CHUNK)
    programs = max(_LEAST_PROGRAMS, min(_MOST_PROGRAMS, prod(nest.extents) // _POINTS_OF_A_PROGRAM))
    return most, min(most, -(-programs // _programs(nest, tile_for_gpu(nest))))


def _exact_chunks(nest: LoopNest) -> list[int]:
    """Numbers of equal parts, not far from the wanted one."""
    longest = nest.extents[parallel_axes(nest)]
    most, wanted = _wanted_chunks(nest)
    return [c for c in range(max(1, wanted // 4), min(most, wanted * 4) + 1) if longest % c == 0]


def is_one_round(analysis: NestAnalysis) -> bool:
    """Whether no reduction needs another's result, none yields a position, and points are stored before
    them."""
    for n, statement in enumerate(analysis.nest.body):
        if isinstance(statement, Reduce):
            if analysis.levels[n] != 1 or statement.operation in ("argmax", "argmin"):
                return False
        elif analysis.levels[n] and analysis.walks_with(n):
            return False
    return True


class ReductionSplit:
    """The two nests that stand for one with a single round of reductions, its outermost reduced axis in ``chunks``.

    Axes of the first: chunk, the parallel ones, the reduced ones.
    """

    def __init__(self, nest: LoopNest, chunks: int, device: torch.device) -> None:
        self.nest = nest
        self.analysis = analyse(nest, 0)
        self.parallel = parallel_axes(nest)
        self.device = device
        extent = nest.extents[self.parallel]
        self.length = -(-extent // chunks)
        self.chunks = -(-extent // self.length)
        self.is_ragged = self.length * self.chunks != extent
        rows = nest.extents[: self.parallel]
        self.partial_strides = tuple(prod(rows[axis + 1 :]) for axis in range(self.parallel))
        self.partials = {
            n: f"{nest.name}_partial_{n}" for n, s in enumerate(nest.body) if isinstance(s, Reduce)
        }

    def partial_specs(self) -> dict[str, TensorSpec]:
        """Of the buffers between the two."""
        shape = (self.chunks, *self.nest.extents[: self.parallel])
        dtypes = {n: self.nest.body[n].dtype for n in self.partials}  # type: ignore[union-attr]
        return {
            name: TensorSpec.contiguous(shape, dtypes[n], self.device) for n, name in self.partials.items()
        }

    def first(self) -> LoopNest:
        rows = self.nest.extents[: self.parallel]
        extents = (self.chunks, *rows, self.length, *self.nest.extents[self.parallel + 1 :])
        name = f"{self.nest.name}_partials"
        return LoopNest(name, extents, self.nest.reduced_axes, self._first_body(), self.nest.origins)

    def second(self) -> LoopNest:
        extents = (*self.nest.extents[: self.parallel], self.chunks)
        return LoopNest(self.nest.name, extents, 1, self._second_body(), self.nest.origins)

    def first_statements(self) -> list[int]:
        """Those that the first nest has: the reductions, what is stored at every point, and what these need."""
        walking = [
            n for n, s in enumerate(self.nest.body) if isinstance(s, Store) and self.analysis.walks_with(n)
        ]
        return needed_statements(self.nest.body, (*self.partials, *walking))

    def _first_body(self) -> tuple[Statement, ...]:
        body: list[Statement] = []
        number: dict[int, int] = {}

        def add(statement: Statement) -> int:
            body.append(statement)
            return len(body) - 1

        inside: int | None = None
        if self.is_ragged:
            along = [0] * len(self.nest.extents)
            along[self.parallel] = 1
            position = add(Position(self._with_chunk(along)))
            extent = add(Constant(self.nest.extents[self.parallel], torch.int64))
            inside = add(Apply("lt", (position, extent), torch.bool))

        def masked(mask: int | None) -> int | None:
            if mask is None or inside is None:
                return inside if mask is None else number[mask]
            return add(Apply("logical_and", (number[mask], inside), torch.bool))

        for n in self.first_statements():
            statement = self.nest.body[n]
            match statement:
                case Load(access=access, mask=mask):
                    split = access.strides[self.parallel] != 0
                    mask = masked(mask) if split else (None if mask is None else number[mask])
                    number[n] = add(replace(statement, access=self._moved(access, number), mask=mask))
                case Store(access=access, value=value, mask=mask):
                    moved = self._moved(access, number)
                    number[n] = add(replace(statement, access=moved, value=number[value], mask=masked(mask)))
                case Position(strides=strides):
                    number[n] = add(replace(statement, strides=self._with_chunk(strides)))
                case Reduce(operation=operation, argument=argument, dtype=dtype):
                    value = number[argument]
                    if inside is not None:
                        kind = body[value].dtype  # type: ignore[union-attr]
                        neutral = add(Constant(_identity(operation, kind), kind))
                        value = add(Apply("where", (inside, value, neutral), kind))
                    result = add(Reduce(operation, value, dtype))
                    number[n] = result
                    strides = (prod(self.nest.extents[: self.parallel]), *self.partial_strides)
                    padding = (0,) * self.nest.reduced_axes
                    add(Store(Access(self.partials[n], (*strides, *padding)), result))
                case _:
                    number[n] = add(renumbered(statement, number))
        return tuple(body)

    def _second_body(self) -> tuple[Statement, ...]:
        body: list[Statement] = []
        number: dict[int, int] = {}
        stores = [
            n
            for n, s in enumerate(self.nest.body)
            if isinstance(s, Store) and not self.analysis.walks_with(n)
        ]
        totals = [
            sum_beside(self.nest, s)
            for s in self.nest.body
            if isinstance(s, Reduce) and s.operation == "deviations"
        ]
        for n in needed_statements(self.nest.body, [*stores, *totals], self.partials):
            statement = self.nest.body[n]
            if isinstance(statement, Reduce):
                if statement.operation == "deviations":
                    self._add_joined_deviations(body, n, number[sum_beside(self.nest, statement)])
                else:
                    body += [self._partial(n), replace(statement, argument=len(body))]
            else:
                moved = renumbered(statement, number)
                if isinstance(moved, Load | Store):
                    strides = (*moved.access.strides[: self.parallel], 0)
                    moved = replace(moved, access=replace(moved.access, strides=strides))
                elif isinstance(moved, Position):
                    moved = replace(moved, strides=(*moved.strides[: self.parallel], 0))
                body.append(moved)
            number[n] = len(body) - 1
        return tuple(body)

    def _partial(self, n: int) -> Load:
        """A chunk's result of a reduction, in the second nest."""
        rows = prod(self.nest.extents[: self.parallel])
        access = Access(self.partials[n], (*self.partial_strides, rows))
        return Load(access, self.nest.body[n].dtype)  # type: ignore[union-attr]

    def _add_joined_deviations(self, body: list[Statement], n: int, total: int) -> None:
        """Deviations from the mean of all: a chunk's from its own mean, and those of its mean from that of all."""
        statement = self.nest.body[n]
        assert isinstance(statement, Reduce)
        dtype, length = statement.dtype, prod(self.nest.extents[self.parallel :]) // self.chunks

        def add(statement: Statement) -> int:
            body.append(statement)
            return len(body) - 1

        def times(one: int, other: int) -> int:
            return add(Apply("mul", (one, other), dtype))

        chunk_mean = times(
            add(self._partial(sum_beside(self.nest, statement))), add(Constant(1 / length, dtype))
        )
        mean = times(total, add(Constant(1 / (length * self.chunks), dtype)))
        apart = add(Apply("sub", (chunk_mean, mean), dtype))
        between = times(times(apart, apart), add(Constant(length, dtype)))
        add(Reduce("sum", add(Apply("add", (add(self._partial(n)), between), dtype)), dtype))

    def _with_chunk(self, strides: Sequence[int]) -> tuple[int, ...]:
        return (strides[self.parallel] * self.length, *strides)

    def _moved(self, access: Access, number: Mapping[int, int]) -> Access:
        return replace(regathered(access, number), strides=self._with_chunk(access.strides))


def _identity(operation: str, dtype: torch.dtype) -> float | bool:
    if operation in ("any", "all"):
        return operation == "all"
    if operation in ("sum", "prod"):
        return int(operation == "prod")
    if dtype.is_floating_point:
        return float("inf") if operation == "min" else -float("inf")
    if dtype == torch.bool:
        return operation == "min"
    limits = torch.iinfo(dtype)
    return limits.max if operation == "min" else limits.min
