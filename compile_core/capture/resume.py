"""Resume functions: a function's code with a prologue that restores the stack and jumps into its middle.

The parameters of a resume function are the stack values, bottom first, then the local variables that are
set. NULLs on the stack are pushed by the prologue, iterators are made anew from a tuple of the items that
are left.
"""

from __future__ import annotations

import functools
import inspect
import types

import bytecode
from bytecode.instr import CellVar, FreeVar

from compile_core.capture.instructions import decode
from compile_core.capture.python_versions import LOADS_OF_CELLS, PLAIN_LOAD_FAST
from compile_core.errors import InternalError

# What the prologue does for one place of the stack.
VALUE, NULL_PLACE, ITERATOR = "value", "null", "iterator"


# Parameters that carry stack values.
STACK_PREFIX = "_gs_stack_"


def can_resume(code: types.CodeType) -> bool:
    """Whether cells are made at the start only; an inlined comprehension may make one in the middle."""
    names = [instruction.name for instruction in decode(code).instructions]
    return "MAKE_CELL" not in names[names.index("RESUME") :] if "RESUME" in names else False


@functools.lru_cache(maxsize=1024)
def make_resume_code(
    code: types.CodeType, index: int, places: tuple[str, ...], local_names: tuple[str, ...]
) -> types.CodeType:
    """The code that goes on at the instruction ``index`` of ``code`` with the given stack and locals.

    Cell variables become free variables, before the free variables that the code has: the cells exist
    already, and inner functions made before the break share them.
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
    cells = [*code.co_cellvars, *code.co_freevars]
    body: list[object] = []
    for at, item in enumerate(assembled):
        if at == positions[index]:
            body.append(entry)
        if isinstance(item, bytecode.Instr):
            if item.name in ("MAKE_CELL", "COPY_FREE_VARS"):
                continue
            if isinstance(item.arg, CellVar):
                item = bytecode.Instr(item.name, FreeVar(item.arg.name), location=item.location)
            elif code.co_cellvars and item.name in LOADS_OF_CELLS and item.arg in cells:
                item = bytecode.Instr(item.name, FreeVar(str(item.arg)), location=item.location)
        body.append(item)
        if isinstance(item, bytecode.Instr) and item.name == "RESUME" and prologue:
            body += prologue
            prologue = []
    if cells:
        body.insert(0, bytecode.Instr("COPY_FREE_VARS", len(cells), lineno=code.co_firstlineno))
    assembled.clear()
    assembled.extend(body)  # type: ignore[arg-type]
    assembled.cellvars, assembled.freevars = [], cells
    parameters += local_names
    assembled.argnames = parameters
    assembled.argcount = len(parameters)
    assembled.posonlyargcount = assembled.kwonlyargcount = 0
    assembled.flags = bytecode.CompilerFlags(
        int(assembled.flags) & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    )
    assembled.name = f"{code.co_name}_resumed_at_line_{line}"
    return assembled.to_code()
