"""A symbolic frame: the locals, cells and stack of one Python call, and the loop that interprets its code."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gradsplit.compile_core.capture.code_objects.instructions import Code, Handler, Instruction, decode
from gradsplit.compile_core.capture.object_model.functions import CellValue, FunctionValue
from gradsplit.compile_core.capture.values.base import (
    CaptureState,
    LastInstruction,
    LazyValue,
    NotConstant,
    SymbolicRaise,
    Value,
)
from gradsplit.compile_core.errors import CodeLocation, InternalError

logger = logging.getLogger(__name__)

OpcodeHandler = Callable[["Frame", Instruction], None]

# Filled in by the files of opcode families.
OPCODES: dict[str, OpcodeHandler] = {}


def opcode(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the handler of these opcodes.

    It gets the frame, the instruction and as many values off the stack as it has further parameters, the lowest first.
    What it then returns is pushed, if it is not None.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        count = function.__code__.co_argcount - 2
        for name in names:
            if name in OPCODES:
                raise InternalError(f"two handlers for {name}")
            OPCODES[name] = _with_operands(function, count) if count else function
        return function

    return register


def value_opcodes(table: dict[str, Callable[..., Value | None]]) -> None:
    """The same for a table of functions, of which those without values push what they return, too."""
    for name, function in table.items():
        is_plain = function.__code__.co_argcount == 2
        opcode(name)(_pushing(function) if is_plain else function)


def _pushing(function: Callable[..., Any]) -> OpcodeHandler:
    return lambda frame, instruction: frame.stack.append(function(frame, instruction))


def _with_operands(function: Callable[..., Any], count: int) -> OpcodeHandler:
    def replace(frame: Frame, instruction: Instruction) -> None:
        stack = frame.stack
        values = stack[-count:]
        del stack[-count:]
        made = function(frame, instruction, *values)
        if made is not None:
            stack.append(made)

    return replace


class BreakRequested(Exception):
    """The frame came to the step at which an earlier attempt found that the capture must end."""


class Frame:
    """``run`` interprets until the code returns or yields; ``result`` or ``yielded`` then hold the value.

    Variables that are shared with inner functions live in ``cells``, all others in ``locals``.
    """

    def __init__(self, state: CaptureState, function: FunctionValue, arguments: dict[str, Value]) -> None:
        self.state = state
        self.function = function
        self.arguments = arguments
        self.code: Code = decode(function.code)
        self.locals: dict[str, Value] = {}
        self.cells: dict[str, CellValue] = {}
        self.stack: list[Value] = []
        self.index = 0
        self.current = 0
        self.keyword_names: tuple[str, ...] = ()
        self.handled: list[Value] = []
        self.shows_locals = False
        self.result: Value | None = None
        self.yielded: Value | None = None
        self.steps = 0
        self.stop_at_step: int | None = None
        self.before_step: Callable[[], None] | None = None
        self._location: CodeLocation | None = None
        for name in function.code.co_cellvars:
            self.cells[name] = CellValue(arguments.get(name))
        for name, cell in zip(function.code.co_freevars, function.closure, strict=True):
            self.cells[name] = cell
        for name, value in arguments.items():
            if name not in self.cells:
                self.locals[name] = value

    def location(self) -> CodeLocation:
        if self._location is None or self._location.line != self.place()[1]:
            self._location = CodeLocation.of(*self.place())
        return self._location

    def place(self) -> tuple[types.CodeType, int]:
        return self.code.code, self.code.instructions[self.current].line

    def module_name(self) -> str:
        return str(self.function.scope.get("__name__"))

    def held_values(self) -> Iterator[Any]:
        """What the variables of the frame hold."""
        yield from self.locals.values()
        yield from (cell.content for cell in self.cells.values())

    def variable(self, name: str) -> Any:
        """What a variable holds; None, or NULL, where it is not set."""
        cell = self.cells.get(name)
        return self.locals.get(name) if cell is None else cell.content

    def dropped_arguments(self) -> bool:
        """Whether a variable that was an argument holds something else by now, or nothing."""
        return any(not _holds(self, name, value) for name, value in self.arguments.items())

    def push(self, value: Value) -> None:
        self.stack.append(value)

    def pop(self) -> Value:
        return self.stack.pop()

    def pop_many(self, count: int) -> list[Value]:
        if count == 0:
            return []
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def jump(self, instruction: Instruction) -> None:
        self.index = instruction.target

    def run(self, raised: SymbolicRaise | None = None) -> None:
        """Interpret until return, yield, or an exception that this frame does not handle.

        ``raised`` is an exception that is thrown into the frame where it stands.
        """
        self.state.frames.append(self)
        self.yielded = None
        try:
            if raised is not None:
                self.unwind(raised)
            is_logged = logger.isEnabledFor(logging.DEBUG)
            while self.result is None and self.yielded is None:
                if is_logged:
                    instruction = self.code.instructions[self.index]
                    line = CodeLocation.of(self.code.code, instruction.line)
                    logger.debug("%s %s  # %s", instruction.name, instruction.text, line.text)
                self.step()
        finally:
            self.state.frames.pop()

    def step(self) -> None:
        instruction = self.code.instructions[self.index]
        self.current = self.index
        if self.steps == self.stop_at_step:
            raise BreakRequested
        if self.before_step is not None:
            self.before_step()
        self.steps += 1
        self.index += 1
        handler = OPCODES.get(instruction.name)
        if handler is None:
            raise self.state.unsupported("opcode", f"no rule for the instruction {instruction.name}")
        try:
            handler(self, instruction)
        except SymbolicRaise as raised:
            self.unwind(raised)
        except NotConstant as error:
            raise error.args[0].refuse_argument(self.state, instruction.name) from None
        except GuardOnDataDependentSymNode as error:
            explanation = f"a decision by a size that depends on data ({error.cond})"
            raise self.state.unsupported("data-dependent-branch", explanation) from None

    def unwind(self, raised: SymbolicRaise) -> None:
        """Go on at the exception handler, or leave the frame with the exception."""
        handler: Handler | None = self.code.handler_at(self.current)
        if handler is None:
            raise raised
        del self.stack[handler.depth :]
        if handler.pushes_lasti:
            self.push(LastInstruction(self.current))
        self.push(raised.value)
        self.index = handler.target


def _holds(frame: Frame, name: str, argument: Any) -> bool:
    value = frame.variable(name)
    # An argument is read when it is used.
    is_read = isinstance(argument, LazyValue) and getattr(value, "source", None) == argument.source
    return value is argument or is_read
