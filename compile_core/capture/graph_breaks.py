"""Graph breaks: what the runner does at an instruction that has no rule, and how it goes on behind it.

Each kind of instruction that may end a graph has a piece of Python here that does the same as the
instruction. The runner executes it on the rebuilt stack and then calls a resume function for the rest of the
frame.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

from compile_core.capture.base import NULL, CaptureState, Value
from compile_core.capture.constants import SequenceIterator
from compile_core.capture.containers import SequenceValue
from compile_core.capture.directives import is_disabled, is_disabled_recursively
from compile_core.capture.frame import Frame
from compile_core.capture.functions import BoundMethodValue, FunctionValue
from compile_core.capture.instructions import Instruction
from compile_core.capture.iterators import EnumerateIterator, ZipIterator
from compile_core.capture.modules import ModuleValue
from compile_core.capture.reconstruct import RunnerWriter
from compile_core.capture.resume import (
    ITERATOR,
    NULL_PLACE,
    STACK_PREFIX,
    VALUE,
    can_resume,
    make_resume_code,
)
from compile_core.ir.captured import ResumePoint


@dataclass(frozen=True)
class Step:
    """An instruction as Python: takes ``pops`` values off the stack and pushes what ``text`` gives.

    ``text`` has ``{0}`` … for the values, bottom first. With ``pushes`` 0 it is a statement.
    """

    pops: int
    pushes: int
    text: str


def _fixed(pops: int, text: str, pushes: int = 1) -> Callable[[Instruction], Step]:
    return lambda instruction: Step(pops, pushes, text.replace("NAME", str(instruction.value)))


_STEPS: dict[str, Callable[[Instruction], Step]] = {
    "STORE_ATTR": _fixed(2, "{1}.NAME = {0}", 0),
    "DELETE_ATTR": _fixed(1, "del {0}.NAME", 0),
    "BINARY_SUBSCR": _fixed(2, "{0}[{1}]"),
    "STORE_SUBSCR": _fixed(3, "{1}[{2}] = {0}", 0),
    "DELETE_SUBSCR": _fixed(2, "del {0}[{1}]", 0),
    "BINARY_SLICE": _fixed(3, "{0}[{1}:{2}]"),
    "STORE_SLICE": _fixed(4, "{1}[{2}:{3}] = {0}", 0),
    "UNARY_NEGATIVE": _fixed(1, "-{0}"),
    "UNARY_NOT": _fixed(1, "not {0}"),
    "TO_BOOL": _fixed(1, "bool({0})"),
    "GET_ITER": _fixed(1, "iter({0})"),
    "FORMAT_SIMPLE": _fixed(1, "format({0})"),
    "FORMAT_WITH_SPEC": _fixed(2, "format({0}, {1})"),
    "IS_OP": lambda instruction: Step(2, 1, "{0} is not {1}" if instruction.arg else "{0} is {1}"),
    "CONTAINS_OP": lambda instruction: Step(2, 1, "{0} not in {1}" if instruction.arg else "{0} in {1}"),
    "COMPARE_OP": lambda instruction: Step(
        2,
        1,
        f"bool({{0}} {instruction.value} {{1}})"
        if "bool(" in instruction.text
        else f"{{0}} {instruction.value} {{1}}",
    ),
}

_JUMPS = {
    name: name.endswith("TRUE")
    for way in ("", "FORWARD_", "BACKWARD_")
    for name in (f"POP_JUMP_{way}IF_TRUE", f"POP_JUMP_{way}IF_FALSE")
}


def _format_value(instruction: Instruction) -> Step:
    conversion = {0: "{0}", 1: "str({0})", 2: "repr({0})", 3: "ascii({0})"}[instruction.arg & 3]
    if instruction.arg & 4:
        return Step(2, 1, f"format({conversion}, {{1}})")
    return Step(1, 1, f"format({conversion})")


_STEPS["FORMAT_VALUE"] = _format_value
_STEPS["CONVERT_VALUE"] = lambda instruction: _format_value(
    Instruction("FORMAT_VALUE", instruction.arg, None, "", 0, 0, -1)
)


class BreakWriter:
    """Writes the end of a runner whose capture stopped at the frame's next instruction."""

    def __init__(self, state: CaptureState, frame: Frame, writer: RunnerWriter, cells_argument: bool) -> None:
        self.state = state
        self.frame = frame
        self.writer = writer
        # The resume functions of a function with cells of its own get all cells as an argument.
        self.passes_cells = cells_argument or bool(frame.code.code.co_cellvars)
        self._cells = ""
        self.points: list[ResumePoint] = []
        self.lines: list[str] = []

    def check(self) -> None:
        """Raise Unsupported where a break cannot be taken at this instruction."""
        frame = self.frame
        if frame.code.handler_at(frame.index) is not None:
            raise self.state.unsupported("break-in-block", "a graph break inside a with or try block")
        if not can_resume(frame.code.code):
            raise self.state.unsupported(
                "break-with-cells", "a graph break in a function with a cell of a comprehension"
            )
        if frame.handled:
            raise self.state.unsupported("break-in-handler", "a graph break inside an except block")

    def build(self) -> None:
        """Rebuild stack and locals (before any effect is stored), and note the lines that come after the
        effects."""
        frame = self.frame
        stack = list(frame.stack)
        # The stack parameters of a resume function are dead once its prologue has pushed them.
        names = [
            name
            for name, value in frame.locals.items()
            if value is not NULL and not name.startswith(STACK_PREFIX)
        ]
        kinds, shown = [], []
        for value in stack:
            kind, text = self._place(value)
            kinds.append(kind)
            shown.append(text)
        if self.passes_cells:
            code = frame.code.code
            cells = [frame.cells[name] for name in (*code.co_cellvars, *code.co_freevars)]
            self._cells = ", ".join(self.writer.emit(cell) for cell in cells)
        local_texts = [self.writer.emit(frame.locals[name]) for name in names]
        instruction = frame.code.instructions[frame.index]
        if instruction.name in _JUMPS:
            condition = shown.pop()
            kinds.pop()
            taken = self._resume(instruction.target, kinds, shown, names, local_texts)
            fallen = self._resume(frame.index + 1, kinds, shown, names, local_texts)
            first, second = (taken, fallen) if _JUMPS[instruction.name] else (fallen, taken)
            self.lines += [f"if {condition}: return {first}", f"return {second}"]
            return
        step, values = self._step(instruction, stack, shown)
        kept = len(stack) - step.pops
        kinds, shown = kinds[:kept], shown[:kept]
        if step.pushes:
            self.lines.append(f"result = {step.text.format(*values)}")
            kinds.append(VALUE)
            shown.append("result")
        else:
            self.lines.append(step.text.format(*values))
        self.lines.append(f"return {self._resume(frame.index + 1, kinds, shown, names, local_texts)}")

    def _place(self, value: Value) -> tuple[str, str]:
        if value is NULL:
            return NULL_PLACE, "None"
        if isinstance(value, (SequenceIterator, ZipIterator, EnumerateIterator)):
            if not _is_snapshot(value):
                raise self.state.unsupported(
                    "break-in-loop", "a graph break in a loop over a list or another iterator"
                )
            rest = SequenceValue(list(self.state.items_of(value)), tuple)
            return ITERATOR, self.writer.emit(rest)
        return VALUE, self.writer.emit(value)

    def _resume(
        self, index: int, kinds: list[str], shown: list[str], names: list[str], local_texts: list[str]
    ) -> str:
        frame = self.frame
        code = make_resume_code(frame.code.code, index, tuple(kinds), tuple(names))
        name = f"resume_{len(self.points)}"
        self.points.append(ResumePoint(name, code, self.passes_cells))
        arguments = [text for kind, text in zip(kinds, shown, strict=True) if kind != NULL_PLACE]
        if self.passes_cells:
            arguments.insert(0, f"({self._cells}{',' if self._cells else ''})")
        return f"{name}({', '.join([*arguments, *local_texts])})"

    def _step(self, instruction: Instruction, stack: list[Value], shown: list[str]) -> tuple[Step, list[str]]:
        name = instruction.name
        if name in ("CALL", "CALL_KW"):
            return self._call_step(instruction, stack, shown)
        if name == "CALL_FUNCTION_EX":
            return self._spread_call_step(instruction, stack, shown)
        if name == "BINARY_OP":
            symbol = instruction.text
            if symbol.endswith("="):
                self.lines.append(f"target = {shown[-2]}")
                self.lines.append(f"target {symbol} {shown[-1]}")
                return Step(2, 1, "target"), []
            return Step(2, 1, f"{{0}} {symbol} {{1}}"), shown[-2:]
        if name == "LOAD_METHOD" or (name == "LOAD_ATTR" and not instruction.text == instruction.value):
            raise self.state.unsupported(
                "break-at-method", f"a graph break at the look-up of the method {instruction.value}"
            )
        if name == "LOAD_ATTR":
            return Step(1, 1, f"{{0}}.{instruction.value}"), shown[-1:]
        make = _STEPS.get(name)
        if make is None:
            raise self.state.unsupported(
                "break-at-instruction", f"no way to go on behind the instruction {name}"
            )
        step = make(instruction)
        return step, shown[len(shown) - step.pops :]

    def _call_step(
        self, instruction: Instruction, stack: list[Value], shown: list[str]
    ) -> tuple[Step, list[str]]:
        names = self.frame.keyword_names
        extra = 0
        if instruction.name == "CALL_KW":
            names, extra = stack[-1].as_constant(), 1
        count = instruction.arg
        base = len(stack) - count - 2 - extra
        arguments = shown[base + 2 : len(stack) - extra]
        first, second = stack[base], stack[base + 1]
        at = base if second is NULL else base + 1
        if first is not NULL and second is not NULL:
            at = base
            arguments.insert(0, shown[base + 1])
        positional = arguments[: len(arguments) - len(names)]
        named = [f"{key}={text}" for key, text in zip(names, arguments[len(positional) :], strict=True)]
        call = self._callee(stack[at], shown[at])
        return Step(count + 2 + extra, 1, f"{call}{', '.join([*positional, *named])})"), []

    def _spread_call_step(
        self, instruction: Instruction, stack: list[Value], shown: list[str]
    ) -> tuple[Step, list[str]]:
        pops = 3 + (instruction.arg & 1)
        parts = shown[len(shown) - pops :]
        at = len(stack) - pops
        at = at if stack[at] is not NULL else at + 1
        spread = f"*{parts[2]}" + (f", **{parts[3]}" if instruction.arg & 1 else "")
        return Step(pops, 1, f"{self._callee(stack[at], shown[at])}{spread})"), []

    def _callee(self, value: Value, text: str) -> str:
        """The start of a call, up to its first argument: of the compiled form where the callee has one."""
        function = value.function if isinstance(value, BoundMethodValue) else value
        existing = (
            isinstance(function, FunctionValue) and function.real is not None and not function.is_library
        )
        if isinstance(function, FunctionValue) and is_disabled(function.real):
            # Of a function whose frame alone is disabled, what it calls may have a compiled form.
            existing = not is_disabled_recursively(function.real)
        if existing or isinstance(function, ModuleValue):
            return f"call_compiled({text}, "
        return f"{text}("


def _is_snapshot(iterator: Value) -> bool:
    """Whether nothing can change what an iterator has left, so that its items may be taken out at once."""
    if isinstance(iterator, SequenceIterator):
        return iterator.cls is not type(iter([]))
    if isinstance(iterator, ZipIterator):
        return all(_is_snapshot(inner) for inner in iterator.iterators)
    if isinstance(iterator, EnumerateIterator):
        return _is_snapshot(iterator.iterator)
    return False


def resume_function(point: ResumePoint, original: types.FunctionType) -> types.FunctionType:
    """The resume function of a point, with the globals and cells of the original function.

    Where the cells come as an argument, those of the function itself are empty and only fill the places.
    """
    closure = original.__closure__
    if point.cells_argument:
        closure = tuple(types.CellType() for _ in point.code.co_freevars)
    return types.FunctionType(point.code, original.__globals__, point.code.co_name, None, closure)
