"""Code that is entered in its middle: what runs one instruction as plain Python, and what goes on behind it.

A ``Rest`` says where a frame goes on: at which instruction, with what on the stack and which variables set. It is what
a graph break leaves, and the capture interprets it in the function's own code. *Break code* runs a single instruction,
and leaves by calling one of the functions it was given: one for going on behind the instruction, one for its jump, and
one for the handler of what it raises. *Resume code* is the function's own code with a prologue that restores the stack
and jumps. It is only assembled where a rest runs as plain Python: to take a whole function apart at each of its breaks
takes time that grows with the square of its length.

The parameters are the stack values, bottom first, then the local variables that are set. ``super()`` looks for the
frame's first argument, which hence comes before all others where that may be called. What cannot be passed is made by
the prologue: NULLs, the state of an exception that is being handled, and the place of an instruction that raised.
Cell variables become free variables: the cells exist already, and inner functions made before share them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import bytecode
from bytecode.instr import CellVar, FreeVar, TryBegin, TryEnd

from gradsplit.compile_core.capture.code_objects.instructions import (
    NO_FALL_THROUGH,
    Instruction,
    decode,
    editable,
)
from gradsplit.compile_core.capture.code_objects.python_versions import (
    CALL_NEEDS_PRECALL,
    END_OF_FOR,
    FORWARD_JUMP_OF,
    LOADS_OF_CELLS,
    METHOD_LOADS,
    NULL_IS_ABOVE_CALLABLE,
    PLAIN_LOAD_FAST,
    TAKES_BOOL,
)

_T = TypeVar("_T")

# Parameters that carry stack values, and the local variables of break code on its way out.
STACK_PREFIX = "_gs_stack_"
_EXIT_PREFIX = "_gs_exit_"
_OUT_PREFIX = "_gs_out_"

# Instructions that never end a graph: they only move what the frame already has.
_NOT_BREAKABLE = frozenset(
    [
        *("COPY", "SWAP", "POP_TOP", "PUSH_NULL", "STORE_FAST", "STORE_FAST_MAYBE_NULL", "DELETE_FAST"),
        *("LOAD_FAST_AND_CLEAR", "MAKE_CELL", "COPY_FREE_VARS", "RESUME", "NOP", "CACHE", "KW_NAMES"),
        *("PRECALL", "PUSH_EXC_INFO", "POP_EXCEPT", "END_FOR", "SEND", "END_SEND", "YIELD_VALUE"),
        *("RETURN_GENERATOR", "GET_YIELD_FROM_ITER", "CLEANUP_THROW", "RERAISE", "JUMP_FORWARD"),
        *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    ]
)
_FRAME_READERS = frozenset(["locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"])

# The parameter that holds the frame's first argument where that lies in a cell.
FIRST_ARGUMENT = "_gs_first"


@dataclass(frozen=True)
class StackPlace:
    """One place of the stack. ``instruction`` is what raised, for a place of the kind LAST_INSTRUCTION."""

    kind: str
    instruction: int = -1


VALUE = StackPlace("value")
NULL_PLACE = StackPlace("null")
# Below an exception that is being handled: the one that was handled before. The parameter is the former.
HANDLED = StackPlace("handled")
LAST_INSTRUCTION = StackPlace("last instruction")


@dataclass(frozen=True)
class Rest:
    """What is left of a frame: ``code`` from the instruction ``index`` on, with this stack and these variables set."""

    code: types.CodeType
    index: int
    places: tuple[StackPlace, ...]
    local_names: tuple[str, ...]

    @property
    def stack_parameters(self) -> list[str | None]:
        """The names that the values of the stack are passed under; None for what is made by the prologue."""
        passed = (VALUE.kind, HANDLED.kind)
        return [
            f"{STACK_PREFIX}{at}" if place.kind in passed else None for at, place in enumerate(self.places)
        ]

    @property
    def parameters(self) -> list[str]:
        return in_order(self.code, self.local_names, filter(None, self.stack_parameters))


@dataclass(frozen=True)
class BreakCode:
    """``code`` takes one callable for each exit, then stack values and locals.

    With ``has_handler`` the last exit is for the exception that the instruction raises.
    """

    code: types.CodeType
    exits: tuple[Rest, ...]
    has_handler: bool


def in_order(code: types.CodeType, local: Sequence[_T], between: Iterable[_T]) -> list[_T]:
    """Parameters or arguments: the frame's first argument where ``super()`` looks for it, what is between, the other
    variables."""
    leading = 1 if uses_super(code) else 0
    return [*local[:leading], *between, *local[leading:]]


def stub_of(rest: Rest) -> types.CodeType:
    """A code object that stands for a rest: it has the parameters and the free variables of the resume code."""
    code, names = rest.code, rest.parameters
    return _stub.__code__.replace(
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_argcount=len(names),
        co_nlocals=len(names),
        co_varnames=tuple(names),
        co_freevars=(*code.co_cellvars, *code.co_freevars),
        co_consts=(None, rest),
    )


def _stub() -> None:
    pass


def rest_of(code: types.CodeType) -> Rest | None:
    """What a stub stands for; None for any other code."""
    last = code.co_consts[-1] if code.co_consts else None
    return last if isinstance(last, Rest) else None


@functools.lru_cache(maxsize=4096)
def can_resume(code: types.CodeType) -> bool:
    """Whether a cell variable is a cell from the start to the end; an inlined comprehension may use its place."""
    instructions = decode(code).instructions
    names = [instruction.name for instruction in instructions]
    if "RESUME" not in names or "MAKE_CELL" in names[names.index("RESUME") :]:
        return False
    return not any(
        instruction.name == "LOAD_FAST_AND_CLEAR" and instruction.value in code.co_cellvars
        for instruction in instructions
    )


def uses_super(code: types.CodeType) -> bool:
    """Whether the code may call ``super()``, which takes the frame's first argument from its first place."""
    return "__class__" in code.co_freevars and code.co_argcount > 0


def sees_its_frame(code: types.CodeType) -> bool:
    """Whether the code may look at its local variables from outside, and would find those that are added here."""
    return not _FRAME_READERS.isdisjoint(code.co_names)


def can_break_at(instruction: Instruction) -> bool:
    return instruction.name not in _NOT_BREAKABLE


def make_resume_code(rest: Rest) -> types.CodeType:
    """The whole function's code, entered where the rest begins."""
    instructions = decode(rest.code).instructions
    resume = next(at for at, instruction in enumerate(instructions) if instruction.name == "RESUME")
    entry = bytecode.Label()
    prologue = _prologue(rest)
    prologue.append(bytecode.Instr("JUMP_FORWARD", entry, lineno=instructions[rest.index].line))
    body: list[Any] = []
    number = 0
    for item in editable(rest.code, conserve_exception_block_stackdepth=True):
        if not isinstance(item, bytecode.Instr):
            body.append(item)
            continue
        if number == rest.index:
            body.append(entry)
        body.append(_with_free_cells(item, rest.code))
        if number == resume:
            body += prologue
        number += 1
    made = _assembled(rest, rest.parameters, body)
    if LAST_INSTRUCTION.kind not in [place.kind for place in rest.places]:
        return made
    decoded = decode(made).instructions
    shift = len(decoded) - len(instructions)

    def resolve(constant: Any) -> Any:
        return (
            decoded[constant.instruction + shift].offset // 2
            if isinstance(constant, StackPlace)
            else constant
        )

    return made.replace(co_consts=tuple(map(resolve, made.co_consts)))


def make_break_code(rest: Rest) -> BreakCode:
    """The code that runs the first instruction of a rest."""
    code, index, places = rest.code, rest.index, rest.places
    instruction, handler = decode(code).instructions[index], decode(code).handler_at(index)
    behind, jumped, raised = bytecode.Label(), bytecode.Label(), bytecode.Label()
    exits: dict[bytecode.Label, Rest] = {}

    def add_exit(label: bytecode.Label, target: int, stack: tuple[StackPlace, ...]) -> None:
        exits[label] = Rest(code, target, stack, rest.local_names)

    run: list[Any] = _copies(code, index, jumped)
    if instruction.name not in NO_FALL_THROUGH:
        add_exit(behind, index + 1, _places_after(instruction, places, False))
        run.append(bytecode.Instr("JUMP_FORWARD", behind, lineno=instruction.line))
    if instruction.target >= 0:
        skipped = len(END_OF_FOR) if instruction.name == "FOR_ITER" else 0
        add_exit(jumped, instruction.target + skipped, _places_after(instruction, places, True))
    if handler is not None:
        pushed = (StackPlace(LAST_INSTRUCTION.kind, index),) if handler.pushes_lasti else ()
        add_exit(raised, handler.target, (*places[: handler.depth], *pushed, VALUE))
        begin = TryBegin(raised, handler.pushes_lasti, handler.depth)
        # Where a call raised in a frame of Python's own, 3.13 looks for the handler just before the call.
        run = [begin, bytecode.Instr("NOP", lineno=instruction.line), *run, TryEnd(begin)]
    names = [f"{_EXIT_PREFIX}{at}" for at in range(len(exits))]
    body = [bytecode.Instr("RESUME", 0, lineno=instruction.line), *_prologue(rest), *run]
    for name, (label, way_out) in zip(names, exits.items(), strict=True):
        body.append(label)
        if label is jumped and instruction.name == "FOR_ITER":
            # The interpreter skips the instructions that end a loop, but they must be there.
            body += [bytecode.Instr(ending, lineno=instruction.line) for ending in END_OF_FOR]
        body += _leave(name, way_out, instruction.line)
    parameters = in_order(code, rest.local_names, [*names, *filter(None, rest.stack_parameters)])
    return BreakCode(_assembled(rest, parameters, body), tuple(exits.values()), handler is not None)


def _places_after(
    instruction: Instruction, places: tuple[StackPlace, ...], jump: bool
) -> tuple[StackPlace, ...]:
    name, arg = instruction.name, instruction.arg
    pair = (VALUE, NULL_PLACE) if NULL_IS_ABOVE_CALLABLE else (NULL_PLACE, VALUE)
    if called := called_values(instruction):
        return (*places[: len(places) - called], VALUE)
    if _loads_method(instruction):
        return (*places[: len(places) - METHOD_LOADS[name]], *pair)
    if name == "LOAD_GLOBAL" and arg & 1:
        return (*places, *pair)
    if name == "FOR_ITER" and jump:
        return places[:-1]
    opcode = dis.opmap[name]
    effect = dis.stack_effect(opcode, arg if opcode >= dis.HAVE_ARGUMENT else None, jump=jump)
    # Only values are taken off by all others, so the places below keep their kind and new ones are values.
    count = len(places) + effect
    return (*places[:count], *[VALUE] * (count - len(places)))


def called_values(instruction: Instruction) -> int:
    """How many values a call takes off the stack, from the callable and its NULL on; 0 of other instructions."""
    arg = instruction.arg
    counts = {"CALL": arg + 2, "CALL_KW": arg + 3, "CALL_FUNCTION_EX": 3 + (arg & 1)}
    return counts.get(instruction.name, 0)


def _loads_method(instruction: Instruction) -> bool:
    """Whether an instruction leaves a method and its object, or NULL and what was found: which, is only known
    at run time."""
    if instruction.name == "LOAD_METHOD":
        return True
    return instruction.name in METHOD_LOADS and bool(instruction.arg & 1)


def _leave(exit_name: str, way_out: Rest, line: int) -> list[bytecode.Instr]:
    """Take the stack down, ending the handling of exceptions on the way, and hand everything to the exit."""

    def make(name: str, *arguments: Any) -> bytecode.Instr:
        return bytecode.Instr(name, *arguments, lineno=line)

    lines, loads = [], []
    for at, place in reversed(list(enumerate(way_out.places))):
        if place.kind == HANDLED.kind:
            lines.append(make("POP_EXCEPT"))
            loads.append([make(PLAIN_LOAD_FAST, f"{STACK_PREFIX}{at}")])
        elif place.kind == LAST_INSTRUCTION.kind:
            lines.append(make("POP_TOP"))
        else:  # a NULL, which POP_TOP does not take, leaves the variable unset
            name = f"{_OUT_PREFIX}{at}"
            lines.append(make("STORE_FAST", name))
            if place.kind == VALUE.kind:
                # The frame would keep an exception whose traceback holds the frame.
                loads.append([make(PLAIN_LOAD_FAST, name), make("DELETE_FAST", name)])
    callee = [make("PUSH_NULL"), make(PLAIN_LOAD_FAST, exit_name)]
    lines += reversed(callee) if NULL_IS_ABOVE_CALLABLE else callee
    local = [[make(PLAIN_LOAD_FAST, name)] for name in way_out.local_names]
    passed = in_order(way_out.code, local, reversed(loads))
    lines += itertools.chain(*passed)
    prefix = [make("PRECALL", len(passed))] if CALL_NEEDS_PRECALL else []
    return [*lines, *prefix, make("CALL", len(passed)), make("RETURN_VALUE")]


def _with_free_cells(item: bytecode.Instr, code: types.CodeType) -> bytecode.Instr:
    """An instruction of the code where all its cells exist already, and are free variables."""
    if item.name in ("MAKE_CELL", "COPY_FREE_VARS"):
        return bytecode.Instr("NOP", location=item.location)
    if isinstance(item.arg, CellVar):
        return bytecode.Instr(item.name, FreeVar(item.arg.name), location=item.location)
    if (
        code.co_cellvars
        and item.name in LOADS_OF_CELLS
        and item.arg in (*code.co_cellvars, *code.co_freevars)
    ):
        return bytecode.Instr(item.name, FreeVar(str(item.arg)), location=item.location)
    return item


def _copies(code: types.CodeType, index: int, jumped: bytecode.Label) -> list[bytecode.Instr]:
    """An instruction with those that belong before it; its jump goes to a label behind."""
    decoded = decode(code)
    first = index
    while first > 0 and decoded.instructions[first - 1].name in ("KW_NAMES", "PRECALL"):
        first -= 1
    copies = [_with_free_cells(item, code) for item in decoded.items[first : index + 1]]
    last = copies[-1]
    if isinstance(last.arg, bytecode.Label):
        name = FORWARD_JUMP_OF.get(last.name, last.name)
        copies[-1] = bytecode.Instr(name, jumped, location=last.location)
    if _loads_method(decoded.instructions[index]):
        copies[-1:] = _plain_load(last)
    if last.name in TAKES_BOOL:
        # The capture leaves it to these what the truth of a comparison's result is.
        copies.insert(-1, bytecode.Instr("TO_BOOL", location=last.location))
    return copies


def _prologue(rest: Rest) -> list[bytecode.Instr]:
    """Restores the stack from the parameters."""
    line = decode(rest.code).instructions[rest.index].line
    found: list[bytecode.Instr] = []

    def put(name: str, *arguments: Any) -> None:
        found.append(bytecode.Instr(name, *arguments, lineno=line))

    for place, parameter in zip(rest.places, rest.stack_parameters, strict=True):
        if place.kind == NULL_PLACE.kind:
            put("PUSH_NULL")
        elif parameter is None:
            put("LOAD_CONST", place)  # where that instruction is, is known when the code is
        else:
            put(PLAIN_LOAD_FAST, parameter)
            if place.kind == HANDLED.kind:
                put("PUSH_EXC_INFO")
                put("POP_TOP")
    return found


def _assembled(rest: Rest, parameters: list[str], body: list[Any]) -> types.CodeType:
    """The code of a function with these parameters that is, to all who ask, the function of the rest."""
    code = rest.code
    made = bytecode.Bytecode(body)
    made.name, made.qualname, made.filename = code.co_name, code.co_qualname, code.co_filename
    made.first_lineno = code.co_firstlineno
    flags = code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    made.flags = bytecode.CompilerFlags(flags)
    made.argnames, made.argcount = parameters, len(parameters)
    made.freevars = [*code.co_cellvars, *code.co_freevars]
    if made.freevars:
        made.insert(0, bytecode.Instr("COPY_FREE_VARS", len(made.freevars), lineno=code.co_firstlineno))
    size = max(code.co_stacksize, len(rest.places)) + len(parameters) + 4
    return made.to_code(stacksize=size, check_pre_and_post=False, compute_exception_stack_depths=False)


def _plain_load(load: bytecode.Instr) -> list[bytecode.Instr]:
    """A look-up of a method as one of a plain attribute, with the NULL that a call expects beside it."""
    location = load.location
    if load.name == "LOAD_METHOD":
        plain = bytecode.Instr("LOAD_ATTR", load.arg, location=location)
    else:
        assert isinstance(load.arg, tuple)
        argument: Any = (False, *load.arg[1:])
        plain = bytecode.Instr(load.name, argument, location=location)
    null = bytecode.Instr("PUSH_NULL", location=location)
    swap = [] if NULL_IS_ABOVE_CALLABLE else [bytecode.Instr("SWAP", 2, location=location)]
    return [plain, null, *swap]
