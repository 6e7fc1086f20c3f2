"""Graph breaks: how a runner ends where the capture met an instruction that has no rule, and goes on behind it.

The runner rebuilds the stack and the local variables and calls *break code*, which runs the one instruction as
plain Python. From there every way on leads to the rest of the frame, which is captured in turn, or runs as plain Python
where the instruction raised what a handler of the frame's is for. The rest is not called by the runner, or a loop with
a break would nest a call per round, but handed to the call that the user made, as a ``Continuation``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.code_objects.instructions import decode
from gradsplit.compile_core.capture.code_objects.live_variables import live_variables
from gradsplit.compile_core.capture.code_objects.resume import (
    FIRST_ARGUMENT,
    HANDLED,
    LAST_INSTRUCTION,
    NULL_PLACE,
    VALUE,
    Rest,
    StackPlace,
    called_values,
    can_break_at,
    can_resume,
    in_order,
    make_break_code,
    make_resume_code,
    rest_of,
    sees_its_frame,
    stub_of,
    uses_super,
)
from gradsplit.compile_core.capture.directives import is_disabled, is_disabled_recursively
from gradsplit.compile_core.capture.frames.frame import Frame
from gradsplit.compile_core.capture.object_model.existing_objects import CallableReferenceValue
from gradsplit.compile_core.capture.object_model.functions import BoundMethodValue, FunctionValue
from gradsplit.compile_core.capture.object_model.libraries import runs_code_of_users
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.object_model.partials import PartialValue
from gradsplit.compile_core.capture.reconstruct import RunnerWriter
from gradsplit.compile_core.capture.values.base import (
    HANDLED_BEFORE,
    NULL,
    CaptureState,
    LastInstruction,
    Value,
)
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir.captured import ResumePoint


class Continuation:
    """The rest of a call: a function and its arguments."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def take_arguments(self) -> tuple[Any, ...]:
        """The arguments, of which it keeps none: an exception among them would hold what it went through."""
        arguments, self.arguments = self.arguments, ()
        return arguments


def run_to_end(result: Any) -> Any:
    """Follow the continuations of a call until it returns."""
    while type(result) is Continuation:
        result = result.function(*result.take_arguments())
    return result


def following(run: Callable[..., Any]) -> Callable[..., Any]:
    """A runner that is followed to its end: by then nothing is left of its variables, as of a plain frame's that have
    new values, or of what was on its stack."""
    return lambda *given: run_to_end(run(*given))


def enter(frame: Frame, rest: Rest) -> None:
    """Put the frame of a stub where its rest begins."""
    state = frame.state
    frame.code, frame.index, frame.current = decode(rest.code), rest.index, rest.index
    state.frames.append(frame)
    try:
        for place, name in zip(rest.places, rest.stack_parameters, strict=True):
            if name is None:
                frame.push(NULL if place.kind == NULL_PLACE.kind else LastInstruction(place.instruction))
                continue
            value = state.realize(frame.locals.pop(name))
            if place.kind == HANDLED.kind:
                frame.handled.append(value)
            frame.push(HANDLED_BEFORE if place.kind == HANDLED.kind else value)
    finally:
        state.frames.pop()


class BreakWriter:
    """Writes the end of a runner whose capture stopped at the frame's next instruction."""

    def __init__(self, state: CaptureState, frame: Frame, writer: RunnerWriter, cells_argument: bool) -> None:
        self.state = state
        self.frame = frame
        self.writer = writer
        self.code = frame.code.code
        # The resume functions of a function with cells of its own get all cells as an argument.
        self.passes_cells = cells_argument or bool(self.code.co_cellvars)
        self.points: list[ResumePoint] = []
        self.lines: list[str] = []

    def check(self) -> None:
        """Raise Unsupported where a break cannot be taken at this instruction."""
        frame, state = self.frame, self.state
        instruction = frame.code.instructions[frame.index]
        if not can_break_at(instruction):
            raise state.unsupported("break-at-instruction", f"a graph break at {instruction.name}")
        if sees_its_frame(self.code):
            raise state.unsupported("break-in-seen-frame", "a graph break in a function that reads its frame")
        if not can_resume(self.code):
            raise state.unsupported(
                "break-with-cells", "a graph break in a function with a cell of a comprehension"
            )
        if sum(value is HANDLED_BEFORE for value in frame.stack) != len(frame.handled):
            raise state.unsupported("break-at-reraise", "a graph break where an exception goes on")

    def emit(self) -> tuple[tuple[StackPlace, ...], list[str], dict[str, str], list[str]]:
        """Rebuild stack, locals and cells: places of the stack, their texts, names and texts of the locals,
        texts of the cells. Must come before any effect is stored."""
        frame = self.frame
        handled = iter(frame.handled)
        places, shown = [], []
        for value in frame.stack:
            if value is NULL:
                places.append(NULL_PLACE)
            elif isinstance(value, LastInstruction):
                places.append(StackPlace(LAST_INSTRUCTION.kind, value.index))
            else:
                places.append(HANDLED if value is HANDLED_BEFORE else VALUE)
                shown.append(self.writer.emit(next(handled) if value is HANDLED_BEFORE else value))
        cells = []
        if self.passes_cells:
            names = (*self.code.co_cellvars, *self.code.co_freevars)
            cells = [self.writer.emit(frame.cells[name]) for name in names]
        # The stack parameters of a resume function are dead once its prologue has pushed them.
        local_texts = self._first_argument() if uses_super(self.code) else {}
        live = live_variables(self.code, frame.index)
        for name in self.code.co_varnames:
            value = frame.locals.get(name, NULL)
            # What the graph computes and nobody reads is no result of it: it would have gradients, and stay in memory.
            is_dead = isinstance(value, TensorValue) and value.source is None and name not in live
            if value is not NULL and not is_dead:
                local_texts[name] = self.writer.emit(value)
        return tuple(places), shown, local_texts, cells

    def _first_argument(self) -> dict[str, str]:
        """The variable that ``super()`` looks for, which must come first."""
        name = self.code.co_varnames[0]
        value = self.frame.variable(name)
        if value is None or value is NULL:
            raise self.state.unsupported("break-without-self", "the first argument of a method was deleted")
        return {FIRST_ARGUMENT if name in self.frame.cells else name: self.writer.emit(value)}

    def build(self) -> None:
        """Note the lines that come after the effects."""
        places, shown, local_texts, cells = self.emit()
        broken = make_break_code(Rest(self.code, self.frame.index, places, tuple(local_texts)))
        callee = self._callee_place()
        if callee is not None:
            at = sum(place.kind in (VALUE.kind, HANDLED.kind) for place in places[:callee])
            shown[at] = f"compiled_form({shown[at]})"
        cells_text = "".join(f"{cell}, " for cell in cells)
        function = self.frame.function.real
        assert function is not None
        if self.passes_cells:
            self.lines.append(f"cells = ({cells_text})")
            made = f"{self.writer.constant(types.FunctionType)}({self.writer.constant(broken.code)}, "
            made += f"{self.writer.constant(function.__globals__)}, {function.__name__!r}, None, cells)"
        else:
            closure = function.__closure__
            real = types.FunctionType(broken.code, function.__globals__, function.__name__, None, closure)
            made = self.writer.constant(real)
        exits = [self._exit(rest) for rest in broken.exits[: len(broken.exits) - broken.has_handler]]
        if broken.has_handler:
            exits.append(self._handler(broken.exits[-1]))
        arguments = ", ".join(in_order(self.code, list(local_texts.values()), [*exits, *shown]))
        self.lines.append(f"return {made}({arguments})")

    def _exit(self, rest: Rest) -> str:
        name = f"resume_{len(self.points)}"
        self.points.append(ResumePoint(name, rest, self.passes_cells))
        return self._bound(self.writer.constant(Continuation), name)

    def _handler(self, rest: Rest) -> str:
        original = self.frame.function.real
        assert original is not None
        function = resume_function(ResumePoint("", rest, self.passes_cells), original)
        return self._bound(self.writer.constant(plain_rest(function, self.passes_cells)))

    def _bound(self, function: str, *arguments: str) -> str:
        name = f"exit_{len(self.lines)}"
        bound = ", ".join([function, *arguments, *["cells"] * self.passes_cells])
        self.lines.append(f"{name} = {self.writer.constant(functools.partial)}({bound})")
        return name

    def _callee_place(self) -> int | None:
        """The place of what the instruction calls, where that may have a compiled form."""
        stack, instruction = self.frame.stack, self.frame.code.instructions[self.frame.index]
        called = called_values(instruction)
        if not called:
            return None
        base = len(stack) - called
        place = base if stack[base] is not NULL else base + 1
        return place if may_be_compiled(stack[place]) else None


def may_be_compiled(callee: Value) -> bool:
    """Whether a call of it may run Python code of the user."""
    if isinstance(callee, BoundMethodValue):
        return may_be_compiled(callee.function)
    if isinstance(callee, FunctionValue):
        if is_disabled(callee.real):
            # Of a function whose frame alone is disabled, what it calls may have a compiled form.
            return not is_disabled_recursively(callee.real)
        return not callee.is_library if callee.real is None else runs_code_of_users(callee.real)
    if isinstance(callee, CallableReferenceValue):
        return isinstance(callee.real, types.FunctionType) and runs_code_of_users(callee.real)
    return isinstance(callee, (InstanceValue, PartialValue))


def plain_rest(function: types.FunctionType, cells_argument: bool) -> Callable[..., Continuation]:
    """Takes the arguments of a resume function, and gives what runs it as plain Python. The code for that is made at
    the first call.

    With ``cells_argument`` the cells of the function come before its arguments.
    """

    @functools.cache
    def code() -> types.CodeType:
        rest = rest_of(function.__code__)
        assert rest is not None
        return make_resume_code(rest)

    def proceed(*arguments: Any) -> Continuation:
        cells = arguments[0] if cells_argument else function.__closure__
        made = types.FunctionType(code(), function.__globals__, function.__name__, None, cells)
        return Continuation(made, *arguments[cells_argument:])

    return proceed


def plain_call(function: types.FunctionType, cells_argument: bool) -> Callable[..., Any]:
    """What calls a resume function as plain Python."""
    return following(plain_rest(function, cells_argument))


def resume_function(point: ResumePoint, original: types.FunctionType) -> types.FunctionType:
    """What stands for the rest of a point, with the globals and cells of the original function.

    Where the cells come as an argument, those of the function itself are empty and only fill the places.
    """
    code, closure = stub_of(point.rest), original.__closure__
    if point.cells_argument:
        closure = tuple(types.CellType() for _ in code.co_freevars)
    made = types.FunctionType(code, original.__globals__, code.co_name, None, closure)
    made.__module__ = original.__module__
    return made
