"""A stable readable print of loop programs, for people, dumps and golden tests."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    AttentionNest,
    BandNest,
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    NestBatch,
    Position,
    ProductNest,
    Reduce,
    Statement,
    Step,
    View,
)

_AXIS_NAMES = "ijklmnpqrstuvw"


def print_program(program: LoopProgram) -> str:
    """One line per buffer and step, one per statement of a nest."""
    lines = [f"program {program.name}({', '.join(program.inputs)})"]
    if program.destinations:
        lines.append(f"  destinations {', '.join(program.destinations)}")
    roles = dict.fromkeys(program.inputs, "input") | dict.fromkeys(program.destinations, "destination")
    roles |= dict.fromkeys(program.constants, "constant")
    lines += [f"  {roles.get(name, 'temporary')} {name}: {spec}" for name, spec in program.buffers.items()]
    for step in program.steps:
        lines += ["  " + line for line in print_step(step).splitlines()]
    lines.append("  return " + ", ".join("none" if view is None else _view(view) for view in program.outputs))
    return "\n".join(lines) + "\n"


def print_step(step: Step) -> str:
    """A nest with its body, or a call in one line."""
    if isinstance(step, ProductNest):
        tile = step.tile
        product = f"{step.product} = {_view(step.left)} @ {_view(step.right)}"
        block = f"{tile.rows}x{tile.columns}x{tile.inner}, {tile.stages} stages, {tile.warps} warps"
        return f"product {product} in blocks of {block}, {step.precision}, into\n{print_nest(step.epilogue)}"
    if isinstance(step, AttentionNest):
        return _print_attention(step)
    if isinstance(step, NestBatch):
        sizes = ", ".join(str(prod(member.extents)) for member in step.members)
        return f"batch {step.name} of nests like the first, over {sizes}\n  " + print_nest(
            step.members[0]
        ).replace("\n", "\n  ")
    if isinstance(step, BandNest):
        sums = ", ".join(f"{buffer} = sum of %{value}" for value, buffer in step.sums)
        return f"bands {step.name} of {step.band} rows, {sums}, of\n{print_nest(step.rows)}"
    return print_nest(step) if isinstance(step, LoopNest) else _print_call(step)


def axis_name(axis: int) -> str:
    return _AXIS_NAMES[axis] if axis < len(_AXIS_NAMES) else f"a{axis}"


def print_nest(nest: LoopNest) -> str:
    """The iteration space, reduced axes after a bar, and the body."""
    named = [f"{axis_name(axis)}:{extent}" for axis, extent in enumerate(nest.extents)]
    parallel = len(named) - nest.reduced_axes
    space = ", ".join(named[:parallel]) + (" | " + ", ".join(named[parallel:]) if nest.reduced_axes else "")
    lines = [f"nest {nest.name} [{space.strip()}]"]
    lines += [f"  {print_statement(number, statement)}" for number, statement in enumerate(nest.body)]
    return "\n".join(lines)


def print_statement(number: int, statement: Statement) -> str:
    """One statement; ``number`` is the value that it defines."""
    if isinstance(statement, Constant):
        return f"%{number} = {statement.value!r} {_dtype(statement.dtype)}"
    if isinstance(statement, Position):
        return f"%{number} = index {' + '.join(_terms(statement.offset, statement.strides)) or '0'}"
    if isinstance(statement, Load):
        masked = "" if statement.mask is None else f" if %{statement.mask} else {statement.other!r}"
        return f"%{number} = load {print_access(statement.access)}{masked} {_dtype(statement.dtype)}"
    if isinstance(statement, Apply):
        arguments = ", ".join(f"%{argument}" for argument in statement.arguments)
        parameter = "" if statement.parameter is None else f", {_dtype(statement.parameter)}"
        return f"%{number} = {statement.operation}({arguments}{parameter}) {_dtype(statement.dtype)}"
    if isinstance(statement, Reduce):
        return f"%{number} = reduce_{statement.operation}(%{statement.argument}) {_dtype(statement.dtype)}"
    masked = "" if statement.mask is None else f" if %{statement.mask}"
    sign = {None: "=", "sum": "+="}.get(statement.reduction, f"{statement.reduction}=")
    return f"{print_access(statement.access)} {sign} %{statement.value}{masked}"


def print_access(access: Access) -> str:
    """``buffer[offset + axis * stride + gathered * stride]``."""
    terms = _terms(access.offset, access.strides)
    terms += [
        f"{gather.stride}*({-gather.size if gather.wraps else 0} <= %{gather.value} < {gather.size})"
        for gather in access.gathers
    ]
    return f"{access.buffer}[{' + '.join(terms) or '0'}]"


def _terms(offset: int, strides: Sequence[int]) -> list[str]:
    terms = [str(offset)] if offset else []
    for axis, stride in enumerate(strides):
        if stride:
            terms.append(axis_name(axis) if stride == 1 else f"{stride}*{axis_name(axis)}")
    return terms


def _print_call(call: ExternCall) -> str:
    arguments = [_argument(argument) for argument in call.arguments]
    arguments += [f"{name}={_argument(argument)}" for name, argument in call.keywords.items()]
    arguments += [f"{name}={_view(view)}" for name, view in call.out.items()]
    results = ", ".join(name or "_" for name in call.outputs)
    return f"{results} = {call.target}({', '.join(arguments)})"


def _print_attention(step: AttentionNest) -> str:
    tile, body = step.tile, step.body
    results = ", ".join("_" if view is None else _view(view) for view in step.results)
    given = ", ".join(_view(view) for view in (*step.operands, *step.lists))
    cut = f"tiles of {tile.queries}x{tile.keys}, {tile.stages} stages, {tile.warps} warps, {step.precision}"
    gradient = "" if body.gradient is None else f", gradient %{body.gradient} of {body.arriving}"
    values = f"%{body.changed} of {body.score} where %{body.keep}{gradient}"
    return (
        f"attention {step.part} {results} = ({given}) by blocks of {step.block_sizes} in {cut}, "
        f"scale {step.scale}, with {values} in\n{print_nest(body.nest)}"
    )


def _argument(argument: Any) -> str:
    if isinstance(argument, View):
        return _view(argument)
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument(part) for part in argument)}]"
    return str(argument)


def _view(view: View) -> str:
    offset = f"+{view.offset}" if view.offset else ""
    return f"{view.buffer}{offset}{_sizes(view.shape)}@{_sizes(view.stride)}"


def _sizes(sizes: Sequence[int]) -> str:
    return "(" + ",".join(map(str, sizes)) + ")"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
