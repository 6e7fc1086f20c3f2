"""Pads the rows of matrices that a program keeps to itself, so that matrix products read them 16 bytes at a time.

GPT-2 has a vocabulary of 50257: no row of its logits begins at an aligned address, nor of their gradient, and the three
products that write and read them run at a fraction of their speed. Where the program itself allocates such a matrix,
its rows are laid out with a few unused elements behind each; nests write and read the matrix with other strides. A
matrix that goes outside keeps its layout: a product writes it with padded rows, and a nest copies it, which costs far
less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from compile_core.ir.loops import Access, ExternCall, Load, LoopNest, LoopProgram, Step, Store, View
from compile_core.ir.step_effects import reads, views_in, writes
from compile_core.ir.tensor_spec import TensorSpec
from compile_core.lowering.tiling_axes import cut_axis

aten = torch.ops.aten

_PRODUCTS = (aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out)
_ALIGNED_BYTES = 16
_LEAST_COLUMNS, _LEAST_ELEMENTS = 64, 1 << 16
# From this inner side on a product gains more than the copy of its result costs.
_LEAST_INNER = 256


class _NotRows(Exception):
    """A buffer is not walked row by row."""


@dataclass(frozen=True)
class _Rows:
    """Addresses of a matrix of ``columns`` columns, for one whose rows are ``pitch`` apart."""

    columns: int
    pitch: int

    def steps(self, offset: int, walks: Iterable[tuple[int, int]]) -> tuple[int, list[int]]:
        """Offset and strides of a walk along some axes, each given by its extent and its stride.

        Raises:
            _NotRows: an axis goes beyond the end of a row other than by whole rows.
        """
        if offset < 0:
            raise _NotRows
        column = offset % self.columns
        strides = []
        for extent, stride in walks:
            if stride < 0:
                raise _NotRows
            if extent == 1 or stride % self.columns == 0:
                strides.append(stride // self.columns * self.pitch)
            else:
                strides.append(stride)
                column += (extent - 1) * stride
        if column >= self.columns:
            raise _NotRows
        return offset // self.columns * self.pitch + offset % self.columns, strides


def pad_rows(program: LoopProgram, with_float32: bool) -> LoopProgram:
    """The same program with aligned rows in its own matrices.

    Args:
        with_float32: pad float32 too, which tensor cores multiply in the format TF32 only.
    """
    program = _with_copies(program, with_float32)
    outside = {*program.inputs, *program.destinations, *program.constants}
    outside |= {view.buffer for view in program.outputs if view is not None}
    for name in _operands(program):
        spec = program.buffers[name]
        if name not in outside and _is_worth_it(spec, with_float32):
            try:
                program = _padded(program, name)
            except _NotRows:
                continue
    return program


def _with_copies(program: LoopProgram, with_float32: bool) -> LoopProgram:
    """The program in which large products write to matrices of its own, not straight to the outside."""
    returned = {view.buffer for view in program.outputs if view is not None} | set(program.destinations)
    buffers = dict(program.buffers)
    steps: list[Step] = []
    for step in program.steps:
        out = _large_product(step)
        spec = None if out is None else replace(buffers[out.buffer], shape=out.shape, stride=out.stride)
        if out is None or spec is None or out.buffer not in returned or not _is_worth_it(spec, with_float32):
            steps.append(step)
            continue
        assert isinstance(step, ExternCall)
        own = View(f"{out.buffer}_rows_{len(steps)}", out.shape, out.stride)
        buffers[own.buffer] = spec
        # Under beta=0 the result itself stands where something to add would.
        arguments = tuple(own if argument == out else argument for argument in step.arguments)
        steps.append(replace(step, arguments=arguments, out={"out": own}))
        load = Load(Access(own.buffer, own.stride), torch.float32)
        store = Store(Access(out.buffer, out.stride, out.offset), 0)
        steps.append(LoopNest(f"{own.buffer}_copied", out.shape, 0, (load, store), step.origins))
    return replace(program, buffers=buffers, steps=tuple(steps))


def _large_product(step: Step) -> View | None:
    """Where a step puts the product of two matrices, if that costs more than to copy it and the step does not add to
    what lies there."""
    if not isinstance(step, ExternCall) or step.target not in (aten.mm.out, aten.addmm.out):
        return None
    out = step.out["out"]
    adds = step.target is aten.addmm.out and step.keywords.get("beta", 1) != 0
    reads_result = adds and step.arguments[0].buffer == out.buffer
    return None if reads_result or step.arguments[-1].shape[0] < _LEAST_INNER else out


def _operands(program: LoopProgram) -> list[str]:
    products = [s for s in program.steps if isinstance(s, ExternCall) and s.target in _PRODUCTS]
    return list(dict.fromkeys(name for step in products for name in sorted(reads(step) | writes(step))))


def _is_worth_it(spec: TensorSpec, with_float32: bool) -> bool:
    dtypes = (torch.float16, torch.bfloat16, *([torch.float32] if with_float32 else []))
    if (
        spec.device.type != "cuda"
        or spec.dtype not in dtypes
        or not spec.is_contiguous
        or len(spec.shape) < 2
    ):
        return False
    columns = spec.shape[-1]
    is_aligned = columns * spec.dtype.itemsize % _ALIGNED_BYTES == 0
    return not is_aligned and columns >= _LEAST_COLUMNS and spec.numel >= _LEAST_ELEMENTS


def _padded(program: LoopProgram, name: str) -> LoopProgram:
    spec = program.buffers[name]
    columns = spec.shape[-1]
    elements = _ALIGNED_BYTES // spec.dtype.itemsize
    rows = _Rows(columns, -(-columns // elements) * elements)
    outer = [prod(spec.shape[k + 1 : -1]) * rows.pitch for k in range(len(spec.shape) - 1)]
    buffers: Mapping[str, TensorSpec] = {**program.buffers, name: replace(spec, stride=(*outer, 1))}
    steps = tuple(
        _with_rows(step, name, rows) if name in reads(step) | writes(step) else step for step in program.steps
    )
    return replace(program, buffers=buffers, steps=steps)


def _with_rows(step: Step, name: str, rows: _Rows) -> Step:
    if isinstance(step, LoopNest):
        return _nest_with_rows(step, name, rows)
    if not isinstance(step, ExternCall) or step.target not in _PRODUCTS:
        raise _NotRows  # some operators choose the layout of their results by that of their arguments

    def moved(view: View) -> View:
        if view.buffer != name:
            return view
        offset, strides = rows.steps(view.offset, zip(view.shape, view.stride, strict=True))
        return replace(view, stride=tuple(strides), offset=offset)

    assert all(isinstance(argument, View) for argument in step.arguments) and not list(
        views_in(dict(step.keywords))
    )
    return replace(
        step,
        arguments=tuple(map(moved, step.arguments)),
        out={keyword: moved(view) for keyword, view in step.out.items()},
    )


def _nest_with_rows(nest: LoopNest, name: str, rows: _Rows) -> LoopNest:
    # An axis that runs through several rows is cut where they end.
    for axis in reversed(range(len(nest.extents))):
        extent = nest.extents[axis]
        runs_on = any(
            access.strides[axis] == 1 and extent > rows.columns
            for access in _accesses(nest)
            if access.buffer == name
        )
        if runs_on:
            if extent % rows.columns:
                raise _NotRows
            nest = cut_axis(nest, axis, rows.columns)

    def moved(access: Access) -> Access:
        if access.buffer != name:
            return access
        walks = [
            *zip(nest.extents, access.strides, strict=True),
            *((g.size, g.stride) for g in access.gathers),
        ]
        offset, strides = rows.steps(access.offset, walks)
        count = len(nest.extents)
        gathers = tuple(
            replace(gather, stride=stride)
            for gather, stride in zip(access.gathers, strides[count:], strict=True)
        )
        return replace(access, offset=offset, strides=tuple(strides[:count]), gathers=gathers)

    body = tuple(
        replace(statement, access=moved(statement.access))
        if isinstance(statement, Load | Store)
        else statement
        for statement in nest.body
    )
    return replace(nest, body=body)


def _accesses(nest: LoopNest) -> list[Access]:
    return [statement.access for statement in nest.body if isinstance(statement, Load | Store)]
