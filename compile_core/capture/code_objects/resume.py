"""Code that is entered in its middle: what runs one instruction as plain Python, and what goes on behind it.

Both are a function's own code with a prologue that restores the stack and jumps. *Resume code* goes on at an
instruction. *Break code* runs a single instruction, a copy under the same exception handlers, and leaves by
calling one of the functions it was given: one for going on behind the instruction, one for its jump. What the
instruction raises is handled by the function's own handlers, from where on the frame stays plain.

The parameters are the stack values, bottom first, then the local variables that are set. ``super()`` looks for the
frame's first argument, which hence comes before all others where that may be called. What cannot be passed is made by
the prologue: NULLs, the state of an exception that is being handled, and the place of an instruction that raised.
Cell variables become free variables: the cells exist already, and inner functions made before share them.
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from dataclasses import dataclass
from typing import Any

import bytecode
from bytecode.instr import CellVar, FreeVar, TryBegin, TryEnd

from gradsplit.compile_core.capture.code_objects.instructions import Instruction, decode, editable
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
from gradsplit.compile_core.errors import InternalError

# Parameters that carry stack values, and the local variables of break code on its way out.
STACK_PREFIX = "_gs_stack_"
_EXIT_PREFIX = "_gs_exit_"
_OUT_PREFIX = "_gs_out_"

# Instructions that never end a graph: they only move what the frame already has.
_NOT_BREAKABLE = frozenset(
    [
        "COPY",
        "SWAP",
        "POP_TOP",
        "PUSH_NULL",
        "STORE_FAST",
        "STORE_FAST_MAYBE_NULL",
        "DELETE_FAST",
        "LOAD_FAST_AND_CLEAR",
        "MAKE_CELL",
        "COPY_FREE_VARS",
        "RESUME",
        "NOP",
        "CACHE",
        "KW_NAMES",
        "PRECALL",
        "PUSH_EXC_INFO",
        "POP_EXCEPT",
        "END_FOR",
        "SEND",
        "END_SEND",
        "YIELD_VALUE",
        "RETURN_GENERATOR",
        "GET_YIELD_FROM_ITER",
        "CLEANUP_THROW",
        "RERAISE",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
    ]
)
_FRAME_READERS = frozenset(["locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"])

# The parameter that holds the frame's first argument where that lies in a cell.
FIRST_ARGUMENT = "_gs_first"

_NO_FALL_THROUGH = frozenset(["RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"])


@dataclass(frozen=True)
class Place:
    """One place of the stack. ``instruction`` is what raised, for a place of the kind LAST_INSTRUCTION."""

    kind: str
    instruction: int = -1


VALUE = Place("value")
NULL_PLACE = Place("null")
# Below an exception that is being handled: the one that was handled before. The parameter is the former.
HANDLED = Place("handled")
LAST_INSTRUCTION = Place("last instruction")


@dataclass(frozen=True)
class Exit:
    """A way out of the broken instruction: the instruction to go on at, and the stack there."""

    index: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class BreakCode:
    """``code`` takes one callable for each exit, then stack values and locals."""

    code: types.CodeType
    exits: tuple[Exit, ...]


@dataclass(frozen=True)
class Origin:
    """The code that resume code was made from, and how many instructions were put before its own."""

    code: types.CodeType
    shift: int


_made: weakref.WeakKeyDictionary[types.CodeType, dict[Any, Any]] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[types.CodeType, Origin] = weakref.WeakKeyDictionary()


def origin_of(code: types.CodeType) -> Origin:
    """Where resume code comes from; any other code comes from itself."""
    return _origins.get(code) or Origin(code, 0)


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


def split_locals(
    code: types.CodeType, local_names: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The local variables that are passed before everything else, and those that are passed last."""
    leading = 1 if uses_super(code) else 0
    return local_names[:leading], local_names[leading:]


def uses_super(code: types.CodeType) -> bool:
    """Whether the code may call ``super()``, which takes the frame's first argument from its first place."""
    return "__class__" in code.co_freevars and code.co_argcount > 0


def sees_its_frame(code: types.CodeType) -> bool:
    """Whether the code may look at its local variables from outside, and would find those that are added here."""
    return not _FRAME_READERS.isdisjoint(code.co_names)


def can_break_at(instruction: Instruction) -> bool:
    return instruction.name not in _NOT_BREAKABLE


def make_resume_code(
    code: types.CodeType, index: int, places: tuple[Place, ...], local_names: tuple[str, ...]
) -> types.CodeType:
    """The code that goes on at the instruction ``index`` of ``code`` with the given stack and locals."""
    known = _made.setdefault(code, {})
    key = (index, places, local_names)
    if key not in known:
        edited = _EditedCode(code)
        entry = bytecode.Label()
        edited.before(index, entry)
        shift = edited.enter(entry, index, places, [], local_names)
        known[key] = edited.assemble(index)
        _origins[known[key]] = Origin(code, shift)
    return known[key]


def make_break_code(
    code: types.CodeType, index: int, places: tuple[Place, ...], local_names: tuple[str, ...]
) -> BreakCode:
    """The code that runs the instruction ``index`` of ``code`` on the given stack and locals."""
    known = _made.setdefault(code, {})
    key = ("break", index, places, local_names)
    if key not in known:
        known[key] = _make_break_code(code, index, places, local_names)
    return known[key]


def _make_break_code(
    code: types.CodeType, index: int, places: tuple[Place, ...], local_names: tuple[str, ...]
) -> BreakCode:
    instruction = decode(code).instructions[index]
    exits = _exits(code, index, places)
    edited = _EditedCode(code)
    entry, behind, jumped = bytecode.Label(), bytecode.Label(), bytecode.Label()
    edited.enter(entry, index, places, [f"{_EXIT_PREFIX}{at}" for at in range(len(exits))], local_names)
    copies = edited.copy_instruction(index, jumped)
    handler = edited.handler_of(index)
    run: list[Any] = [*copies, bytecode.Instr("JUMP_FORWARD", behind, lineno=instruction.line)]
    if handler is not None:
        begin = TryBegin(handler.target, handler.push_lasti, handler.stack_depth)
        # Where a call raised in a frame of Python's own, 3.13 looks for the handler just before the call.
        run = [begin, bytecode.Instr("NOP", lineno=instruction.line), *run, TryEnd(begin)]
    tail = [entry, *run]
    for at, (label, way_out) in enumerate(zip((behind, jumped), exits, strict=False)):
        tail.append(label)
        if label is jumped and instruction.name == "FOR_ITER":
            # The interpreter skips the instructions that end a loop, but they must be there.
            tail += [bytecode.Instr(name, lineno=instruction.line) for name in END_OF_FOR]
        tail += _leave(at, way_out, places, split_locals(code, local_names), instruction.line)
    if not exits:
        tail += [behind, bytecode.Instr("NOP", lineno=instruction.line)]
        tail += [bytecode.Instr("LOAD_CONST", 0, lineno=instruction.line)]
        tail += [bytecode.Instr("RETURN_VALUE", lineno=instruction.line)]
    edited.body += tail
    return BreakCode(edited.assemble(index), exits)


def _exits(code: types.CodeType, index: int, places: tuple[Place, ...]) -> tuple[Exit, ...]:
    """Behind the instruction, then where it jumps to."""
    instruction = decode(code).instructions[index]
    exits = []
    if instruction.name not in _NO_FALL_THROUGH:
        exits.append(Exit(index + 1, _places_after(instruction, places, False)))
    if instruction.target >= 0:
        skipped = len(END_OF_FOR) if instruction.name == "FOR_ITER" else 0
        exits.append(Exit(instruction.target + skipped, _places_after(instruction, places, True)))
    return tuple(exits)


def _places_after(instruction: Instruction, places: tuple[Place, ...], jump: bool) -> tuple[Place, ...]:
    name, arg = instruction.name, instruction.arg
    pair = (VALUE, NULL_PLACE) if NULL_IS_ABOVE_CALLABLE else (NULL_PLACE, VALUE)
    if name == "CALL":
        return (*places[: len(places) - arg - 2], VALUE)
    if name == "CALL_KW":
        return (*places[: len(places) - arg - 3], VALUE)
    if name == "CALL_FUNCTION_EX":
        return (*places[: len(places) - 3 - (arg & 1)], VALUE)
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


def _loads_method(instruction: Instruction) -> bool:
    """Whether an instruction leaves a method and its object, or NULL and what was found: which, is only known
    at run time."""
    if instruction.name == "LOAD_METHOD":
        return True
    return instruction.name in METHOD_LOADS and bool(instruction.arg & 1)


def _leave(
    at: int,
    way_out: Exit,
    entered: tuple[Place, ...],
    local_names: tuple[tuple[str, ...], tuple[str, ...]],
    line: int,
) -> list[bytecode.Instr]:
    """Take the stack down, ending the handling of exceptions on the way, and hand everything to the exit."""

    def make(name: str, *arguments: Any) -> bytecode.Instr:
        return bytecode.Instr(name, *arguments, lineno=line)

    lines = []
    for place in reversed(range(len(way_out.places))):
        kind = way_out.places[place].kind
        if kind == HANDLED.kind:
            lines.append(make("POP_EXCEPT"))
        elif kind == LAST_INSTRUCTION.kind:
            lines.append(make("POP_TOP"))
        else:  # a NULL, which POP_TOP does not take, leaves the variable unset
            lines.append(make("STORE_FAST", f"{_OUT_PREFIX}{place}"))
    callee = [make("PUSH_NULL"), make(PLAIN_LOAD_FAST, f"{_EXIT_PREFIX}{at}")]
    lines += reversed(callee) if NULL_IS_ABOVE_CALLABLE else callee
    names = list(local_names[0])
    for place, item in enumerate(way_out.places):
        if item.kind == HANDLED.kind:
            assert entered[place].kind == HANDLED.kind
            names.append(f"{STACK_PREFIX}{place}")
        elif item.kind == VALUE.kind:
            names.append(f"{_OUT_PREFIX}{place}")
    names += local_names[1]
    lines += [make(PLAIN_LOAD_FAST, name) for name in names]
    prefix = [make("PRECALL", len(names))] if CALL_NEEDS_PRECALL else []
    return [*lines, *prefix, make("CALL", len(names)), make("RETURN_VALUE")]


@dataclass(frozen=True, eq=False)
class _Offset:
    """Stands in the constants for the place of an instruction, until that is known."""

    instruction: int


class _EditedCode:
    """A code object as a list of instructions; ``body`` is what will be assembled."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.assembled = editable(code, conserve_exception_block_stackdepth=True)
        decoded = decode(code).instructions
        self.body: list[Any] = list(self.assembled)
        self.own = [item for item in self.body if isinstance(item, bytecode.Instr)]
        if [item.name for item in self.own] != [instruction.name for instruction in decoded]:
            raise InternalError(f"{code.co_name}: two decoders disagree about the instructions")
        self.cells = [*code.co_cellvars, *code.co_freevars]
        self.stack_size = code.co_stacksize
        self._share_cells()

    def _share_cells(self) -> None:
        code = self.code
        numbers = {id(item): number for number, item in enumerate(self.own)}
        for at, item in enumerate(self.body):
            if not isinstance(item, bytecode.Instr):
                continue
            made = item
            if item.name in ("MAKE_CELL", "COPY_FREE_VARS"):
                # Kept in place, so that the instructions keep their numbers.
                made = bytecode.Instr("NOP", location=item.location)
            elif isinstance(item.arg, CellVar):
                made = bytecode.Instr(item.name, FreeVar(item.arg.name), location=item.location)
            elif code.co_cellvars and item.name in LOADS_OF_CELLS and item.arg in self.cells:
                made = bytecode.Instr(item.name, FreeVar(str(item.arg)), location=item.location)
            if made is not item:
                self.own[numbers[id(item)]] = self.body[at] = made

    def _position(self, index: int) -> int:
        wanted = self.own[index]
        return next(at for at, item in enumerate(self.body) if item is wanted)

    def before(self, index: int, item: Any) -> None:
        self.body.insert(self._position(index), item)

    def handler_of(self, index: int) -> TryBegin | None:
        """What begins the innermost handler around an instruction."""
        active = None
        for item in self.body[: self._position(index)]:
            if isinstance(item, TryBegin):
                active = item
            elif isinstance(item, TryEnd) and item.entry is active:
                active = None
        return active

    def copy_instruction(self, index: int, jumped: bytecode.Label) -> list[bytecode.Instr]:
        """The instruction with those that belong before it; its jump goes to a label behind."""
        first = index
        while self.own[first - 1].name in ("KW_NAMES", "PRECALL") and first > 0:
            first -= 1
        copies = [item.copy() for item in self.own[first : index + 1]]
        instruction = decode(self.code).instructions[index]
        last = copies[-1]
        if isinstance(last.arg, bytecode.Label):
            name = FORWARD_JUMP_OF.get(last.name, last.name)
            copies[-1] = bytecode.Instr(name, jumped, location=last.location)
        if _loads_method(instruction):
            copies[-1:] = _plain_load(last)
        if instruction.name in TAKES_BOOL:
            # The capture leaves it to these what the truth of a comparison's result is.
            copies.insert(-1, bytecode.Instr("TO_BOOL", location=last.location))
        return copies

    def enter(
        self,
        entry: bytecode.Label,
        index: int,
        places: tuple[Place, ...],
        first_parameters: list[str],
        local_names: tuple[str, ...],
    ) -> int:
        """Put the prologue behind RESUME, and name the parameters. Returns how many instructions were put."""
        line = decode(self.code).instructions[index].line
        prologue: list[bytecode.Instr] = []

        def put(name: str, *arguments: Any) -> None:
            prologue.append(bytecode.Instr(name, *arguments, lineno=line))

        leading, others = split_locals(self.code, local_names)
        parameters = [*leading, *first_parameters]
        for position, place in enumerate(places):
            if place.kind == NULL_PLACE.kind:
                put("PUSH_NULL")
                continue
            if place.kind == LAST_INSTRUCTION.kind:
                put("LOAD_CONST", _Offset(place.instruction))
                continue
            name = f"{STACK_PREFIX}{position}"
            parameters.append(name)
            put(PLAIN_LOAD_FAST, name)
            if place.kind == HANDLED.kind:
                put("PUSH_EXC_INFO")
                put("POP_TOP")
        put("JUMP_FORWARD", entry)
        parameters += others
        resume = next(number for number, item in enumerate(self.own) if item.name == "RESUME")
        at = self._position(resume) + 1
        self.body[at:at] = prologue
        if self.cells:
            start = bytecode.Instr("COPY_FREE_VARS", len(self.cells), lineno=self.code.co_firstlineno)
            self.body.insert(0, start)
        assembled = self.assembled
        assembled.cellvars, assembled.freevars = [], list(self.cells)
        assembled.argnames = parameters
        assembled.argcount = len(parameters)
        assembled.posonlyargcount = assembled.kwonlyargcount = 0
        flags = int(assembled.flags) & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        assembled.flags = bytecode.CompilerFlags(flags)
        self.stack_size = max(self.code.co_stacksize, len(places)) + len(parameters) + 4
        return len(prologue) + bool(self.cells)

    def assemble(self, index: int) -> types.CodeType:
        self.assembled.clear()
        self.assembled.extend(self.body)
        made = self.assembled.to_code(
            stacksize=self.stack_size, check_pre_and_post=False, compute_exception_stack_depths=False
        )
        if not any(isinstance(constant, _Offset) for constant in made.co_consts):
            return made
        items = [item for item in self.body if isinstance(item, bytecode.Instr)]
        decoded = decode(made).instructions

        def resolve(constant: Any) -> Any:
            if not isinstance(constant, _Offset):
                return constant
            wanted = self.own[constant.instruction]
            return decoded[next(at for at, item in enumerate(items) if item is wanted)].offset // 2

        return made.replace(co_consts=tuple(resolve(constant) for constant in made.co_consts))


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
