"""Functions of the standard library that are written in C and in Python: the capture follows those in Python.

A module of the library that has both replaces its Python by what it imports of C, where that is found.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES

# With whether functions raise the same in both.
_MODULES = (
    *(("heapq", "_heapq", False), ("bisect", "_bisect", False)),
    *(("collections", "_collections", True), ("functools", "_functools", True)),
)


def _module_in_python(name: str, in_c: str) -> Any:
    """Another copy of a module, made where the one that it takes its C from is not found."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    before = sys.modules[in_c]
    sys.modules[in_c] = None  # type: ignore[assignment]
    try:
        spec.loader.exec_module(made)
    finally:
        sys.modules[in_c] = before
    return made


def _follow(
    in_python: types.FunctionType,
    raises_same: bool,
    state: CaptureState,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value:
    try:
        return state.wrap(in_python, None).call(state, args, kwargs)
    except SymbolicRaise:
        if raises_same:
            raise
        explanation = f"{in_python.__name__} raises, which in C has another text"
        raise state.unsupported("raised-in-c", explanation) from None


for _name, _in_c, _raises_same in _MODULES:
    _real = importlib.import_module(_name)
    for _key, _function in vars(_module_in_python(_name, _in_c)).items():
        _found = getattr(_real, _key, None)
        if isinstance(_function, types.FunctionType) and isinstance(_found, types.BuiltinFunctionType):
            CALL_RULES.setdefault(_found, functools.partial(_follow, _function, _raises_same))
