"""Resume functions: a function's code with a prologue that restores the stack and jumps into its middle.

The parameters of a resume function are the stack values, bottom first, then the local variables that are set. NULLs on
the stack are pushed by the prologue, iterators are made anew from a tuple of the items that are left.
"""

from __future__ import annotations

import functools
import inspect
import types

import bytecode

from compile_core.capture.instructions import decode
from compile_core.capture.python_versions import PLAIN_LOAD_FAST
from compile_core.errors import InternalError

# What the prologue does for one place of the stack.
VALUE, NULL_PLACE, ITERATOR = "value", "null", "iterator"


# Parameters that carry stack values.
STACK_PREFIX = "_gs_stack_"


@functools.lru_cache(maxsize=1024)
def make_resume_code(
    code: types.CodeType, index: int, places: tuple[str, ...], local_names: tuple[str, ...]
) -> types.CodeType:
    """The code that goes on at the instruction ``index`` of ``code`` with the given stack and locals.

    The code object must have no cell variables of its own; free variables stay as they are.
    """
    assembled = bytecode.Bytecode.from_code(code)
    positions = [at for at, item in enumerate(assembled) if isinstance(item, bytecode.Instr)]
    decoded = decode(code).instructions
    names = [assembled[at].name for at in positions]  # type: ignore[union-attr]
    if names != [instruction.name for instruction in decoded]:
        raise InternalError(f"{code.co_name}: two decoders disagree about the instructions")
    line = decoded[index].line
    entry = bytecode.Label()
    prologue: list[bytecode.Instr] = []
    parameters = []
    for place, kind in enumerate(places):
        if kind == NULL_PLACE:
            prologue.append(bytecode.Instr("PUSH_NULL", lineno=line))
            continue
        name = f"{STACK_PREFIX}{place}"
        parameters.append(name)
        prologue.append(bytecode.Instr(PLAIN_LOAD_FAST, name, lineno=line))
        if kind == ITERATOR:
            prologue.append(bytecode.Instr("GET_ITER", lineno=line))
    prologue.append(bytecode.Instr("JUMP_FORWARD", entry, lineno=line))
    start = next(at for at in positions if assembled[at].name == "RESUME") + 1  # type: ignore[union-attr]
    assembled.insert(positions[index], entry)
    assembled[start:start] = prologue
    parameters += local_names
    assembled.argnames = parameters
    assembled.argcount = len(parameters)
    assembled.posonlyargcount = assembled.kwonlyargcount = 0
    assembled.flags = bytecode.CompilerFlags(
        int(assembled.flags) & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    )
    assembled.name = f"{code.co_name}_resumed_at_line_{line}"
    return assembled.to_code()
