"""Triton's reading of kernels, without what nobody asks a process that compiles for.

For every node of a kernel's syntax Triton notes the line and the variable that it belongs to, which nothing shows here;
for every call it looks at the signature of the function that is called; of every function it finds the end by reading
its tokens, and each that a kernel calls it parses again. All that is as long as the rest of reading a kernel.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

# Of modules that are one kernel and nothing else.
KERNEL_MODULE = "gradsplit_triton_kernel_"


def quicken(triton: ModuleType) -> None:
    """Changes Triton in this process, for good."""
    # Triton imports it with its first kernel.
    reading: Any = import_module("triton.compiler.code_generator")
    functions = triton.runtime.jit
    reading.CodeGenerator.visit = _visit_by(triton.compiler.errors.CompilationError)
    reading.CodeGenerator._maybe_set_loc_to_name = _nothing
    reading.inspect = SimpleNamespace(**{**vars(inspect), "signature": _signature})
    functions.inspect = SimpleNamespace(**{**vars(inspect), "getsourcelines": _source_lines})
    functions.JITFunction.parse = _parsed
    _let_tuples_grow(triton.language.core)
    # What a compilation returns: it would read again what was written.
    triton.compiler.compiler.CompiledKernel = _nothing


def _visit_by(compilation_error: type[Exception]) -> Callable[[Any, ast.AST | None], Any]:
    def visit(generator: Any, node: ast.AST | None) -> Any:
        if node is None:
            return None
        before = generator.cur_node
        generator.cur_node = node
        try:
            result = getattr(generator, f"visit_{type(node).__name__}", generator.generic_visit)(node)
        except compilation_error:
            raise
        except Exception as error:
            raise compilation_error(generator.jit_fn.src, generator.cur_node, repr(error)) from None
        generator.cur_node = before
        return result

    return visit


def _let_tuples_grow(core: Any) -> None:
    """Arguments are put into a tuple one by one; each time its type is made again, with a name of all of theirs."""

    def start(kind: Any, types: Any, fields: Any = None) -> None:
        kind.types = types
        kind.fields = fields or [""] * len(types)

    def name(kind: Any) -> str:
        return (
            f"[{','.join(f'{field}:{each}' for field, each in zip(kind.fields, kind.types, strict=False))}]"
        )

    def set_item(values: Any, index: Any, value: Any) -> None:
        index = core._unwrap_if_constexpr(index)
        values.values[index] = value
        types = list(values.type.types)
        (types[index],) = core._type_for_tuple_values([value]).types
        values.type = core.tuple_type(types, values.type.fields)

    if not hasattr(core.tuple_type, "name"):  # later releases of Triton make it where it is asked for
        core.tuple_type.__init__ = start
        core.tuple_type.name = property(name)
    core.tuple._setitem = set_item


def _signature(function: Any) -> inspect.Signature:
    """Only the names of parameters are asked for, so that methods need not be told from functions."""
    return _signature_of(getattr(function, "__func__", function))


_signature_of = cache(inspect.signature)


def _source_lines(function: Any) -> tuple[list[str], int]:
    if not function.__module__.startswith(KERNEL_MODULE):
        return inspect.getsourcelines(function)
    with open(function.__code__.co_filename) as file:
        return file.readlines(), 1


def _parsed(function: Any) -> ast.Module:
    is_kernel = function.__module__.startswith(KERNEL_MODULE)
    return ast.parse(function.src) if is_kernel else _parsed_text(function.src)


@cache
def _parsed_text(text: str) -> ast.Module:
    return ast.parse(text)


def _nothing(*_: Any, **__: Any) -> None:
    """Nobody needs it."""
