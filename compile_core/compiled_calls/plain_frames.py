"""Frames that run as plain Python while what they call is compiled.

The code of such a frame is the user's, except that every callee goes through a function, ``compiled_form``, just before
it is called: the frame itself makes the call, so that ``super()``, ``locals()`` and the like see the frame that they
expect. A callee is found where it is pushed (a global, a method) or, where that is any expression, below its arguments
when the call comes. Calls that no expression of the user's writes (of decorators, context managers, assertions) stay.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import bytecode

from gradsplit.compile_core.capture.code_objects.instructions import (
    NO_FALL_THROUGH,
    Code,
    Instruction,
    decode,
    editable,
)
from gradsplit.compile_core.capture.code_objects.python_versions import (
    CALL_NEEDS_PRECALL,
    LOAD_ATTR_HAS_METHOD_BIT,
    NULL_IS_ABOVE_CALLABLE,
)

CompiledForm = Callable[[Any], Any]

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class PlainFrames:
    """Makes functions whose callees go through ``compiled_form``.

    With ``inner_functions`` the functions that a frame defines count as part of it.
    """

    def __init__(self, compiled_form: CompiledForm, *, inner_functions: bool = False) -> None:
        self._compiled_form = compiled_form
        self._inner_functions = inner_functions
        # Code of two files may be equal.
        self._codes: dict[tuple[types.CodeType, str], types.CodeType] = {}

    def form_of(self, function: types.FunctionType) -> types.FunctionType:
        """``function`` with mapped callees; all else about it is the same."""
        key = function.__code__, function.__code__.co_filename
        code = self._codes.get(key)
        if code is None:
            rewritten = _rewritten(function.__code__, self._inner_functions)
            code = self._codes[key] = _with_form(rewritten, self._compiled_form, key[1])
        made = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(made, function)
        return made


class _Form:
    """Stands for ``compiled_form`` in code that is rewritten once for all of them."""


def _with_form(code: types.CodeType, compiled_form: CompiledForm, filename: str) -> types.CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _with_form(value, compiled_form, filename)
        return compiled_form if value is _Form else value

    return code.replace(co_consts=tuple(map(constant, code.co_consts)), co_filename=filename)


@functools.lru_cache(maxsize=256)
def _rewritten(code: types.CodeType, inner_functions: bool) -> types.CodeType:
    assembled = editable(code)
    decoded = decode(code)
    looked_up_below = _calls_of_expressions(decoded)
    body: list[Any] = []
    index = 0
    for item in assembled:
        if not isinstance(item, bytecode.Instr):
            body.append(item)
            continue
        write = _FrameWriter(body, item, inner_functions)
        instruction = decoded.instructions[index]
        if index in looked_up_below:
            write.map_at(looked_up_below[index])
            body.append(item)
        elif not write.map_where_pushed(instruction):
            body.append(write.with_rewritten_code())
        index += 1
    assembled[:] = body
    return assembled.to_code()


class _FrameWriter:
    """Appends the instructions that take the place of one."""

    def __init__(self, body: list[Any], item: bytecode.Instr, inner_functions: bool) -> None:
        self.body = body
        self.item = item
        self.inner_functions = inner_functions

    def emit(self, name: str, *arg: Any) -> None:
        self.body.append(bytecode.Instr(name, *arg, location=self.item.location))

    def map_top(self) -> None:
        """Replace the value on top of the stack by its compiled form."""
        if not NULL_IS_ABOVE_CALLABLE:
            self.emit("PUSH_NULL")
            self.emit("SWAP", 2)
        self.emit("LOAD_CONST", _Form)
        self.emit("SWAP", 2)
        if NULL_IS_ABOVE_CALLABLE:
            self.emit("PUSH_NULL")
            self.emit("SWAP", 2)
        if CALL_NEEDS_PRECALL:
            self.emit("PRECALL", 1)
        self.emit("CALL", 1)

    def map_at(self, depth: int) -> None:
        """The same for the value that lies so many places below the top."""
        if depth:
            self.emit("SWAP", depth + 1)
        self.map_top()
        if depth:
            self.emit("SWAP", depth + 1)

    def push_null(self) -> None:
        """Complete the pair of callable and NULL."""
        self.emit("PUSH_NULL")
        if not NULL_IS_ABOVE_CALLABLE:
            self.emit("SWAP", 2)

    def map_where_pushed(self, instruction: Instruction) -> bool:
        """Rewrite an instruction that pushes a callee; False if it is none."""
        name, arg = instruction.name, self.item.arg
        if name == "LOAD_GLOBAL" and isinstance(arg, tuple) and arg[0]:
            self.emit("LOAD_GLOBAL", (False, arg[1]))
        elif name == "LOAD_METHOD":
            self.emit("LOAD_ATTR", arg)
        elif name == "LOAD_ATTR" and LOAD_ATTR_HAS_METHOD_BIT and isinstance(arg, tuple) and arg[0]:
            self.emit("LOAD_ATTR", (False, arg[1]))
        elif name == "PUSH_NULL" and NULL_IS_ABOVE_CALLABLE:
            self.map_top()
            self.body.append(self.item)
            return True
        else:
            return False
        self.map_top()
        self.push_null()
        return True

    def with_rewritten_code(self) -> bytecode.Instr:
        """The instruction; the code of a comprehension or of an inner function that it pushes is rewritten."""
        arg = self.item.arg
        if isinstance(arg, types.CodeType) and (self.inner_functions or arg.co_name in _COMPREHENSIONS):
            code: Any = _rewritten(arg, self.inner_functions)
            return bytecode.Instr(self.item.name, code, location=self.item.location)
        return self.item


def _calls_of_expressions(code: Code) -> dict[int, int]:
    """Index of the instruction before which the callee is to be mapped -> how deep the callee then lies.

    Only up to CPython 3.12, where PUSH_NULL comes before the expression of the callee: which of them belongs to a call
    is found by following, along all paths, which instruction pushed each value of the stack.
    """
    if NULL_IS_ABOVE_CALLABLE:
        return {}
    instructions = code.instructions
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[int, list[int]]] = [(0, [])]
    waiting += [
        (handler.target, [-1] * (handler.depth + handler.pushes_lasti + 1)) for handler in code.handlers
    ]
    while waiting:
        index, pushed_by = waiting.pop()
        while index < len(instructions) and index not in seen:
            seen.add(index)
            instruction = instructions[index]
            above = _values_above_callee(instruction)
            if above is not None and len(pushed_by) > above + 1:
                null = pushed_by[-above - 2]
                if null >= 0 and instructions[null].name == "PUSH_NULL":
                    found[_first_of_call(instructions, index)] = above
            if instruction.target >= 0:
                waiting.append((instruction.target, _after(instruction, index, list(pushed_by), True)))
            if instruction.name in NO_FALL_THROUGH:
                break
            pushed_by = _after(instruction, index, pushed_by, False)
            index += 1
    return found


def _values_above_callee(instruction: Instruction) -> int | None:
    if instruction.name == ("PRECALL" if CALL_NEEDS_PRECALL else "CALL"):
        return instruction.arg
    if instruction.name == "CALL_FUNCTION_EX":
        return 1 + (instruction.arg & 1)
    return None


def _first_of_call(instructions: tuple[Instruction, ...], index: int) -> int:
    """KW_NAMES belongs to the call after it."""
    return index - 1 if index and instructions[index - 1].name == "KW_NAMES" else index


def _after(instruction: Instruction, index: int, pushed_by: list[int], jump: bool) -> list[int]:
    opcode = dis.opmap[instruction.name]
    argument = instruction.arg if opcode >= dis.HAVE_ARGUMENT else None
    change = dis.stack_effect(opcode, argument, jump=jump)
    if change < 0:
        del pushed_by[change:]
    if instruction.name in ("CALL", "CALL_FUNCTION_EX"):
        pushed_by[-1] = index  # the result lies where NULL was
    return pushed_by + [index] * change
