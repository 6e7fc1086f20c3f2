"""Code objects, decoded once: instructions with resolved jumps, and the exception table.

Those that are two in one are two here, each with a variable: code that is made from a function's has more variables,
and its instructions keep their numbers.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from dataclasses import dataclass
from typing import Any

import bytecode

from gradsplit.compile_core.capture.code_objects.python_versions import HALVES
from gradsplit.compile_core.errors import InternalError

# After these no instruction follows of itself.
NO_FALL_THROUGH = frozenset(
    [
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
        *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    ]
)


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``target`` is the index of the instruction that a jump goes to, else -1."""

    name: str
    arg: int
    value: Any
    text: str
    offset: int
    line: int
    target: int


@dataclass(frozen=True)
class Handler:
    """An entry of the exception table, over indexes of instructions (``last`` excluded)."""

    first: int
    last: int
    target: int
    depth: int
    pushes_lasti: bool


@dataclass(frozen=True, eq=False)
class Code:
    """A decoded code object."""

    code: types.CodeType
    instructions: tuple[Instruction, ...]
    handlers: tuple[Handler, ...]

    def handler_at(self, index: int) -> Handler | None:
        """The innermost exception handler that covers an instruction."""
        for handler in self.handlers:
            if handler.first <= index < handler.last:
                return handler
        return None

    def is_left_from(self, index: int) -> bool:
        """Whether what an instruction raises leaves the code: it has no handlers there but those of ``with``."""
        handler = self.handler_at(index)
        return handler is None or self.instructions[handler.target + 1].name == "WITH_EXCEPT_START"

    def _end_of_way(self, index: int) -> int:
        """The first instruction, from an instruction on, behind which there are two ways, or none."""
        for at in range(index, len(self.instructions)):
            instruction = self.instructions[at]
            if instruction.target >= 0 or instruction.name.startswith(
                ("RETURN", "YIELD", "RERAISE", "RAISE")
            ):
                break
        return at

    def only_raises(self, index: int) -> bool:
        """Whether an instruction begins a straight way to a ``raise`` that leaves the code, or a false assertion."""
        end = self._end_of_way(index)
        pairs = itertools.pairwise(self.instructions[index:end])
        asserts = any((one.value, then.value) == ("_assert", False) for one, then in pairs)
        return (asserts or self.instructions[end].name == "RAISE_VARARGS") and self.is_left_from(end)

    def leads_to_check(self, index: int) -> bool:
        """Whether the way from an instruction on stores nothing and comes to a decision whether to raise."""
        end = self._end_of_way(index)
        way, jump = self.instructions[index:end], self.instructions[end]
        if "POP_JUMP" not in jump.name or any(instruction.name.startswith("STORE") for instruction in way):
            return False
        return self.only_raises(end + 1) != self.only_raises(jump.target)

    @functools.cached_property
    def items(self) -> tuple[bytecode.Instr, ...]:
        """The instructions in the form in which they can be assembled."""
        items = tuple(item for item in editable(self.code) if isinstance(item, bytecode.Instr))
        if [item.name for item in items] != [instruction.name for instruction in self.instructions]:
            raise InternalError(f"{self.code.co_name}: two decoders disagree about the instructions")
        return items


def parameter_names(code: types.CodeType) -> tuple[str, ...]:
    """In the order of the code's locals: positional, keyword-only, *args, **kwargs."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[:count]


@functools.lru_cache(maxsize=4096)
def decode(code: types.CodeType) -> Code:
    """Decode a code object. EXTENDED_ARG disappears; jumps to it go to the instruction that it extends."""
    disassembled = dis.Bytecode(code)
    kept: list[dis.Instruction] = []
    index_of: dict[int, int] = {}
    for instruction in disassembled:
        index_of[instruction.offset] = len(kept)
        if instruction.opname in HALVES:
            for name, variable in zip(HALVES[instruction.opname], instruction.argval, strict=True):
                kept.append(instruction._replace(opname=name, argval=variable, argrepr=variable))
        elif instruction.opname != "EXTENDED_ARG":
            kept.append(instruction)
    ends = sorted(index_of)
    jumps = set(dis.hasjrel) | set(dis.hasjabs)
    instructions = []
    line = code.co_firstlineno
    for instruction in kept:
        position = instruction.positions
        if position is not None and position.lineno is not None:
            line = position.lineno
        value = instruction.argval
        if instruction.opname == "KW_NAMES":
            value = code.co_consts[instruction.arg or 0]  # dis does not always resolve it
        target = index_of[instruction.argval] if instruction.opcode in jumps else -1
        instructions.append(
            Instruction(
                instruction.opname,
                instruction.arg or 0,
                value,
                instruction.argrepr,
                instruction.offset,
                line,
                target,
            )
        )

    def index_at(offset: int) -> int:
        """The first instruction at or after an offset (an entry may end among inline caches)."""
        for start in ends:
            if start >= offset:
                return index_of[start]
        return len(kept)

    entries = getattr(disassembled, "exception_entries", ())
    handlers = tuple(
        Handler(index_at(entry.start), index_at(entry.end), index_of[entry.target], entry.depth, entry.lasti)
        for entry in entries
    )
    return Code(code, tuple(instructions), handlers)


def editable(code: types.CodeType, *, conserve_exception_block_stackdepth: bool = False) -> bytecode.Bytecode:
    """The code as a list to be changed and assembled; its instructions are those of ``decode``."""
    assembled = bytecode.Bytecode.from_code(
        code, conserve_exception_block_stackdepth=conserve_exception_block_stackdepth
    )
    items: list[Any] = []
    for item in assembled:
        if isinstance(item, bytecode.Instr) and item.name in HALVES:
            assert isinstance(item.arg, tuple)
            for name, variable in zip(HALVES[item.name], item.arg, strict=True):
                items.append(bytecode.Instr(name, variable, location=item.location))
        else:
            items.append(item)
    assembled[:] = items
    return assembled
