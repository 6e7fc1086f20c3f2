"""Which code is trusted not to change while a program runs.

Note [Trusted libraries]: globals, classes and functions of torch, NumPy and the standard library are read
without guards.
A program that replaces ``torch.nn.functional.linear`` or ``math.sqrt`` between two calls keeps the compiled
behaviour of the first. Guarding them would triple the cost of every call, for names that no training program
replaces.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_TRUSTED_ROOTS = (frozenset(sys.stdlib_module_names) | {"torch", "numpy"}) - {"__main__"}


def is_library_name(module_name: object) -> bool:
    if not isinstance(module_name, str):
        return False
    return module_name.split(".", 1)[0] in _TRUSTED_ROOTS or module_name.startswith("namedtuple_")


def runs_code_of_users(function: types.FunctionType) -> bool:
    """Whether a function that is called at a break may have a compiled form: one of the program's, what a library's
    decorator made of one, or an optimizer's step, which calls the program's closure."""
    name = function.__globals__.get("__name__")
    if not is_library_name(name) or str(name).startswith("torch.optim."):
        return True
    contents = [cell.cell_contents for cell in function.__closure__ or () if not is_empty_cell(cell)]
    return any(isinstance(held, types.FunctionType) and runs_code_of_users(held) for held in contents)


def is_empty_cell(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def is_library_object(value: Any) -> bool:
    """Whether a function or class belongs to a trusted library."""
    return is_library_name(getattr(value, "__module__", None))


# Modules of the standard library whose plain data never change.
_CONSTANT_MODULES = frozenset(["math", "cmath", "string", "errno", "token", "opcode"])
_CODE_TYPES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def is_library_state(module_name: str, name: str, value: Any) -> bool:
    """Whether an attribute of a library's module is data that the program may change, as ``sys.argv`` is.

    Such data is guarded like the program's own; see Note [Trusted libraries] for all the rest.
    """
    root = module_name.split(".", 1)[0]
    if name.startswith("_global_optimizer_"):
        return True  # the hooks of all steps
    if root == "torch" or root in _CONSTANT_MODULES or isinstance(value, _CODE_TYPES):
        return False
    if name.startswith("_") or type(value).__module__ in ("typing", "functools"):
        return False
    literal = isinstance(value, (int, float, str, bytes, type(None)))
    return not (literal and name.isupper())
