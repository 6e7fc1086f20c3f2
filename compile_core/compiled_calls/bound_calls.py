"""Functions that are generated for a target: they have its parameters, and bind arguments as Python does."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture import argument_names
from gradsplit.compile_core.compiled_calls.call_targets import NO_OWNER, Target
from gradsplit.compile_core.compiled_calls.entry_table import EntryTable
from gradsplit.compile_core.ir.source_writer import compile_function
from gradsplit.compile_core.ir.sources import identifier_of, variable_of

_UNUSED_DEFAULT: Any = object()


def dispatch_function(
    target: Target,
    table: EntryTable,
    miss: Callable[[tuple[Any, ...]], Any],
) -> types.FunctionType:
    """Walks the table, and calls ``miss`` with the frame's arguments where no entry fits."""
    function = target.function
    signature, passed = _signature_text(function, skip_first=target.owner is not NO_OWNER)
    if target.cells_argument:
        if target.cells is None:
            signature = f"_gs_cells, {signature}"
        passed = f"_gs_cells, {passed}" if passed else "_gs_cells"
    more = f", {passed}" if passed else ""
    # The parameters keep the user's names, so all else has a name that no program uses.
    text = (
        f"def dispatch({signature}):\n"
        "    for _gs_entry in _gs_table.entries:\n"
        f"        _gs_inputs = _gs_entry.check({passed})\n"
        "        if type(_gs_inputs) is list:\n"
        "            if _gs_entry is not _gs_table.entries[0]:\n"
        "                _gs_move_to_front(_gs_entry)\n"
        f"            return _gs_entry.run(_gs_entry.compiled, _gs_inputs{more})\n"
        f"    return _gs_miss(({passed}{',' if passed else ''}))\n"
    )
    constants = {
        "_gs_table": table,
        "_gs_move_to_front": table.move_to_front,
        "_gs_miss": miss,
        "_gs_default": _UNUSED_DEFAULT,
        "_gs_first": target.owner,
        **({} if target.cells is None else {"_gs_cells": target.cells}),
    }
    made = compile_function(text, "dispatch", constants)
    assert isinstance(made, types.FunctionType)
    made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__name__ = function.__name__
    return made


def plain_function(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the frame's arguments and calls the original as its caller did."""
    function = target.function

    def with_cells(cells: tuple[types.CellType, ...]) -> types.FunctionType:
        return types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)

    return compile_function(
        _plain_call_text(target), "plain", {"original": original, "with_cells": with_cells}
    )


def _signature_text(function: types.FunctionType, skip_first: bool) -> tuple[str, str]:
    """Parameters of the dispatch function (with the target's names), and how it passes them on."""
    code = function.__code__
    names = list(map(identifier_of, argument_names(code)))
    positional = names[: code.co_argcount]
    keyword_only = names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = names[code.co_argcount + code.co_kwonlyargcount :]
    first_default = len(positional) - len(function.__defaults__ or ())
    parts: list[str] = []
    for index, name in enumerate(positional):
        if index or not skip_first:
            parts.append(f"{name}=_gs_default" if index >= first_default else name)
        if index + 1 == code.co_posonlyargcount and parts:
            parts.append("/")
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{rest.pop(0)}")
    elif keyword_only:
        parts.append("*")
    defaults = function.__kwdefaults__ or {}
    parts += [f"{name}=_gs_default" if name in defaults else name for name in keyword_only]
    if rest:
        parts.append(f"**{rest[0]}")
    passed = ["_gs_first" if skip_first and index == 0 else name for index, name in enumerate(names)]
    return ", ".join(parts), ", ".join(passed)


def _plain_call_text(target: Target) -> str:
    """The function ``plain``: takes the frame's arguments and calls the original as its caller did.

    It is called ``original``, or is what ``with_cells`` makes of the closure's cells, where they come with each call.
    """
    code = target.function.__code__
    names = list(argument_names(code))
    parts = [variable_of(name) for name in names[: code.co_argcount]]
    if target.owner is not NO_OWNER:
        parts = parts[1:]  # the original is bound to it
    position = code.co_argcount + code.co_kwonlyargcount
    keyword_only = names[code.co_argcount : position]
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{variable_of(names[position])}")
        position += 1
    parts += [f"{name}={variable_of(name)}" for name in keyword_only]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parts.append(f"**{variable_of(names[position])}")
    arguments = ", ".join(map(variable_of, argument_names(code, target.cells_argument)))
    passes_cells = target.cells_argument and target.cells is None and not target.is_module_call
    called = "with_cells(l__gs_cells)" if passes_cells else "original"
    return f"def plain({arguments}):\n    return {called}({', '.join(parts)})\n"
