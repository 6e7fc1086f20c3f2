"""Which local variables the rest of a code object may still read."""

from __future__ import annotations

import dis
import functools
import types

from gradsplit.compile_core.capture.code_objects.instructions import NO_FALL_THROUGH, Code, decode

_STORES = frozenset(["STORE_FAST", "STORE_FAST_MAYBE_NULL"])


def live_variables(code: types.CodeType, index: int) -> frozenset[str]:
    """The local variables that may be read before they are set again, where the code goes on at an instruction.

    To delete a variable counts as reading it: it must be set.
    """
    live = live_at(decode(code))[index]
    return frozenset(name for bit, name in enumerate(code.co_varnames) if live >> bit & 1)


@functools.lru_cache(maxsize=4096)
def live_at(code: Code) -> list[int]:
    """Which variables are live before each instruction, as bits in their order: a data flow, from the end on."""
    instructions, handlers = code.instructions, _handlers(code)
    bits = {name: 1 << bit for bit, name in enumerate(code.code.co_varnames)}
    live = [0] * (len(instructions) + 1)
    has_changed = True
    while has_changed:
        has_changed = False
        for at in range(len(instructions) - 1, -1, -1):
            instruction = instructions[at]
            found = 0 if instruction.name in NO_FALL_THROUGH else live[at + 1]
            if instruction.target >= 0:
                found |= live[instruction.target]
            if instruction.name in _STORES:
                found &= ~bits[instruction.value]
            elif instruction.value in bits and dis.opmap[instruction.name] in dis.haslocal:
                found |= bits[instruction.value]
            if handlers[at] >= 0:
                found |= live[handlers[at]]
            if found != live[at]:
                live[at], has_changed = found, True
    return live


def _handlers(code: Code) -> list[int]:
    """Where each instruction goes that raises; -1 where no handler covers it. Inner ones come first in the table."""
    found = [-1] * len(code.instructions)
    for handler in reversed(code.handlers):
        found[handler.first : handler.last] = [handler.target] * (handler.last - handler.first)
    return found
