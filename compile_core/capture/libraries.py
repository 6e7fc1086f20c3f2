"""Which code is trusted not to change while a program runs.

Note [Trusted libraries]: globals, classes and functions of torch, NumPy and the standard library are read
without guards.
A program that replaces ``torch.nn.functional.linear`` or ``math.sqrt`` between two calls keeps the compiled
behaviour of the first. Guarding them would triple the cost of every call, for names that no training program
replaces.
"""

from __future__ import annotations

import sys
from typing import Any

_TRUSTED_ROOTS = (frozenset(sys.stdlib_module_names) | {"torch", "numpy"}) - {"__main__"}


def is_library_name(module_name: object) -> bool:
    return isinstance(module_name, str) and module_name.split(".", 1)[0] in _TRUSTED_ROOTS


def is_library_object(value: Any) -> bool:
    """Whether a function or class belongs to a trusted library."""
    return is_library_name(getattr(value, "__module__", None))
