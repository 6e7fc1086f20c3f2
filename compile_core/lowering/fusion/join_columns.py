"""Column sums in the kernel of the rows that they are sums of.

The backward of a layer norm walks a matrix twice: for each row the gradient of its elements, and for each column the
gradients of weight and bias. ``fuse.py`` leaves these apart, since a nest has one set of reduced axes. Here the column
sums become part of the nest of rows: a program takes a band of rows and leaves their sums (``BandNest``), a small nest
adds up the bands. The matrix is read once, and what only the sums would have read is not stored at all.

A pair is joined if that moves fewer bytes than the bands' sums cost, if both walk the same matrix in the same order, if
the rows fit in registers, and if no step must run between the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from gradsplit.compile_core.ir.loops import (
    BandNest,
    Constant,
    LoopNest,
    LoopProgram,
    Reduce,
    Statement,
    Step,
    Store,
    accesses,
    operands,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.fusion.pieces import in_pieces
from gradsplit.compile_core.lowering.fusion.step_order import direct_dependencies, topological_order
from gradsplit.compile_core.lowering.nests.body_builder import BodyBuilder
from gradsplit.compile_core.lowering.nests.change_axes import OtherPointsError, Transplant
from gradsplit.compile_core.lowering.nests.live_statements import live_statements, only_statements
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, simplify
from gradsplit.compile_core.lowering.nests.passes import analyse, buffers_of
from gradsplit.compile_core.lowering.tiling.tiling_bands import band_of, partial_bytes
from gradsplit.compile_core.lowering.tiling.tiling_split import ReductionSplit, is_one_round
from gradsplit.compile_core.lowering.tiling.tiling_triton import tile_for_gpu


def join_column_sums(program: LoopProgram) -> LoopProgram:
    """An equivalent program in which column sums on GPUs happen in the kernels of their rows where that pays.

    Of the pairs that stayed apart until now, it says why these rows and columns do, and drops those that are joined.
    """
    apart: dict[tuple[str, str], str] = {}
    together = set[tuple[str, str]]()

    def joined(piece: LoopProgram) -> LoopProgram:
        joining = _Joining(piece)
        piece = joining.run()
        apart.update(joining.apart)
        together.update(joining.together)
        return piece

    program = in_pieces(program, joined)
    left = [
        replace(refusal, reason=apart.get((refusal.first, refusal.second), refusal.reason))
        for refusal in program.unfused
        if (refusal.first, refusal.second) not in together
    ]
    return replace(program, unfused=tuple(left))


class _ApartError(Exception):
    """Why column sums stay apart from rows."""


@dataclass(frozen=True)
class _Joined:
    """A nest of rows with sums of columns, as ``BandNest`` has them."""

    rows: LoopNest
    sums: tuple[tuple[int, str], ...]
    band: int


class _Joining:
    """Steps by number, in the order of the program; see ``fuse._Fusion``."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.buffers = dict(program.buffers)
        self.steps: dict[int, Step] = dict(enumerate(program.steps))
        self.direct = dict(enumerate(direct_dependencies(program.steps)))
        self.readers: dict[str, set[int]] = {}
        for number, step in self.steps.items():
            self._note_reads(number, step)
        returned = {view.buffer for view in program.outputs if view is not None}
        self.kept = returned | set(program.inputs) | set(program.destinations)
        self.together: set[tuple[str, str]] = set()
        self.apart: dict[tuple[str, str], str] = {}

    def run(self) -> LoopProgram:
        simple = {number: nest for number in self.steps if (nest := self._simple(number)) is not None}
        columns = {number: nest for number, nest in simple.items() if _is_of_columns(nest)}
        summed = {name for nest in columns.values() for name in reads(nest)}
        for number, nest in simple.items():
            if not (reads(nest) | writes(nest)) & summed or not _is_of_rows(nest):
                continue
            joined = _Joined(nest, (), 0)
            for other, sums in list(columns.items()):
                if sums.extents != nest.extents[::-1] or not self._shared_bytes(joined.rows, sums):
                    continue
                pairs = ((nest.name, sums.name), (sums.name, nest.name))
                try:
                    joined = self._with_sums(number, joined, other, sums)
                except _ApartError as reason:
                    self.apart.update(dict.fromkeys(pairs, str(reason)))
                else:
                    self.together.update(pairs)
                    del columns[other]
            if joined.sums:
                self.steps[number] = BandNest(nest.name, joined.rows, joined.band, joined.sums)
        order = topological_order(self.direct, {number: number for number in self.steps})
        steps = tuple(self.steps[number] for number in order)
        touched = set[str]().union(*(reads(step) | writes(step) for step in steps)) | self.kept
        buffers = {name: spec for name, spec in self.buffers.items() if name in touched}
        return replace(self.program, buffers=buffers, steps=steps)

    # -- which nests

    def _simple(self, number: int) -> LoopNest | None:
        """A nest over the buffers of one GPU as one over two axes, of which it reduces one."""
        step = self.steps[number]
        if not isinstance(step, LoopNest) or not step.reduced_axes:
            return None
        devices = {self.buffers[name].device for name in buffers_of(step)}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            return None
        nest = simplify(step)
        return nest if len(nest.extents) == 2 and parallel_axes(nest) == 1 else None

    # -- joining

    def _with_sums(self, number: int, joined: _Joined, other: int, columns: LoopNest) -> _Joined:
        """The nest of rows with one more nest of column sums, of which the second half stays.

        Raises:
            _ApartError: the two are better apart, or have to be.
        """
        if self._depends(self.direct[other] - {number}, number) or self._depends({number}, other):
            raise _ApartError("another step must run between the rows and their sums")
        rows = joined.rows
        count = sum(isinstance(s, Reduce) for s in columns.body)
        band = band_of(rows, len(joined.sums) + count)
        if band is None:
            raise _ApartError("the rows are too few or too long for bands")
        if (reads(rows) | writes(rows)) & writes(columns):
            raise _ApartError("the sums' nest stores where the rows' nest reads or stores")
        dead = self._dead_stores(writes(rows) - reads(rows), number, other)
        saved = self._shared_bytes(rows, columns) + sum(self.buffers[name].bytes for name in dead)
        if saved <= count * partial_bytes(rows, band):
            raise _ApartError("the bands' sums would move more bytes")
        split = ReductionSplit(columns, columns.extents[1] // band, self._device(columns))
        first = [n for n in split.first_statements() if n not in split.partials]
        builder = BodyBuilder(rows.extents, lambda name: self.buffers[name].dtype)
        transplant = Transplant(builder)
        try:
            kept = transplant.copy(rows, ([(0, 1)], [(1, 1)]))
            part = replace(columns, body=only_statements(columns.body, first))
            added = dict(zip(first, transplant.copy(part, ([(1, 1)], [(0, 1)])), strict=True))
        except OtherPointsError as reason:
            raise _ApartError(str(reason)) from None
        sums = [(kept[value], name) for value, name in joined.sums]
        for n, name in split.partials.items():
            (argument,) = operands(columns.body[n])
            sums.append((added[argument], name))
        nest, places = _without(rows, builder.statements, dead, [value for value, _ in sums])
        self.buffers.update(split.partial_specs())
        second = split.second()
        for name in reads(columns) - reads(second):
            self.readers[name].discard(other)
        self._note_reads(number, nest)
        self._note_reads(other, second)
        self.steps[other] = second
        self.direct[number] = (self.direct[number] | self.direct[other]) - {number}
        self.direct[other] = self.direct[other] | {number}
        nest = replace(nest, origins=tuple(dict.fromkeys([*rows.origins, *columns.origins])))
        return _Joined(nest, tuple((places[value], name) for value, name in sums), band)

    def _device(self, nest: LoopNest) -> torch.device:
        return self.buffers[buffers_of(nest)[0]].device

    def _depends(self, numbers: Iterable[int], other: int) -> bool:
        """Whether any of some steps must run after another, or is it."""
        seen, pending = set[int](), list(numbers)
        while pending:
            number = pending.pop()
            if number == other:
                return True
            if number not in seen:
                seen.add(number)
                pending += self.direct[number]
        return False

    def _note_reads(self, number: int, step: Step) -> None:
        for name in reads(step):
            self.readers.setdefault(name, set()).add(number)

    def _dead_stores(self, names: Iterable[str], number: int, other: int) -> set[str]:
        """Buffers that the step ``number`` writes and only ``other`` reads."""
        return {n for n in names if n not in self.kept and self.readers.get(n, set()) <= {number, other}}

    def _shared_bytes(self, rows: LoopNest, columns: LoopNest) -> int:
        """What the sums would not have to read."""
        shared = (reads(rows) | writes(rows)) & reads(columns)
        return sum(self.buffers[name].bytes for name in shared)


def _is_of_rows(nest: LoopNest) -> bool:
    """Whether the kernel of a nest would hold rows as a whole, and their elements lie together."""
    positional = any(isinstance(s, Reduce) and s.operation.startswith("arg") for s in nest.body)
    return not positional and _walks_rows(nest, 1) and tile_for_gpu(nest).persistent


def _is_of_columns(nest: LoopNest) -> bool:
    """Whether a nest does nothing but to sum columns, and what it does at each point and after that."""
    reductions = [s for s in nest.body if isinstance(s, Reduce)]
    if any(s.operation != "sum" or not s.dtype.is_floating_point for s in reductions):
        return False
    return _walks_rows(nest, 0) and is_one_round(analyse(nest, 0))


def _walks_rows(nest: LoopNest, axis: int) -> bool:
    """Whether what a nest reads and writes most of lies contiguous along an axis."""
    whole = [access.strides for access in accesses(nest) if all(access.strides)]
    return bool(whole) and all(strides[axis] == 1 for strides in whole)


def _without(
    nest: LoopNest, body: Sequence[Statement], dead: Collection[str], results: Sequence[int]
) -> tuple[LoopNest, dict[int, int]]:
    """The nest with this body but for some buffers' stores and what only these needed, and the new place of each
    statement."""
    live_body = [
        Constant(0, torch.int64) if isinstance(s, Store) and s.access.buffer in dead else s for s in body
    ]
    live = live_statements(live_body, results)
    return replace(nest, body=only_statements(live_body, live)), {old: new for new, old in enumerate(live)}
