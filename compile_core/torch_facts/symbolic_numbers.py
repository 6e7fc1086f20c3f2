"""Torch's symbolic sizes beneath ``torch.fx.experimental.symbolic_shapes``."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    guard_or_false,
    guard_or_true,
    statically_known_true,
)

from gradsplit.compile_core.torch_facts.private_parts import PROGRAMS_RUN_PLAIN, private

_PURPOSE = "sizes that differ between calls"

SourceLocation = private("torch._guards:SLoc", _PURPOSE)
Source = private("torch._guards:Source", _PURPOSE)
integer_infinity = private("torch.utils._sympy.numbers:int_oo", _PURPOSE)
ValueRanges = private("torch.utils._sympy.value_ranges:ValueRanges", _PURPOSE)
PythonPrinter = private("torch.utils._sympy.printers:PythonPrinter", _PURPOSE)
interpret_expression = private("torch.utils._sympy.interp:sympy_interp", _PURPOSE)

# Of what is known of a float by its symbol alone: Python's own ask for its value.
OF_SYMBOLIC_FLOATS: dict[Any, Any] = {
    math.sin: private("torch:_sym_sin", _PURPOSE),
    math.cos: private("torch:_sym_cos", _PURPOSE),
    math.tanh: private("torch:_sym_tanh", _PURPOSE),
    # Their results are of the same kind: a symbol that is positive, and one that may be anything.
    math.exp: functools.partial(operator.pow, math.e),
    math.log: private("torch:_sym_log2", _PURPOSE, instead=private("torch:_sym_tan", _PURPOSE)),
}

# What a program says of numbers that depend on data: it raises where it does not hold.
SAYING: tuple[Any, ...] = tuple(
    private(f"torch:{name}", "what programs say of sizes that depend on data", PROGRAMS_RUN_PLAIN)
    for name in (
        "_check",
        "_check_index",
        "_check_value",
        "_check_type",
        "_check_not_implemented",
        "_check_is_size",
    )
)
assume = SAYING[0]


def value_at_compilation(number: Any) -> Any:
    """An integer as it is at the call that is compiled for: to weigh by, at the price of no condition.

    One that depends on data is not known then; a quarter of the most that it may be is taken for it.
    """
    if not isinstance(number, torch.SymInt):
        return number
    hint = number.node.hint
    if hint is not None:
        return hint
    env, expression = number.node.shape_env, number.node.expr
    values = {symbol: _assumed_value(env, symbol) for symbol in expression.free_symbols}
    return int(expression.xreplace(values))


_MOST_ASSUMED = 4096


def _assumed_value(env: Any, symbol: sympy.Symbol) -> sympy.Expr:
    # Some releases call it otherwise.
    known = (env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val).get(symbol)
    if known is not None:
        return known
    limits = env.var_to_range[symbol]
    most = int(limits.upper) // 4 if limits.upper.is_Integer else _MOST_ASSUMED
    least = int(limits.lower) if limits.lower.is_Integer else 0
    return sympy.Integer(max(least, min(most, _MOST_ASSUMED), 2))


def depends_on_data(value: Any) -> bool:
    """Whether a number, or a size of a tensor, is only known when the graph has read data."""
    return bool(free_unbacked_symbols(value))


def surely(condition: Any) -> bool:
    """Whether a condition on sizes holds, which becomes a guard; of data, whether it is known to hold."""
    return condition if isinstance(condition, bool) else guard_or_false(condition)


def maybe(condition: Any) -> bool:
    """Whether a condition on sizes holds, which becomes a guard; of data, whether it is not known to fail."""
    return condition if isinstance(condition, bool) else guard_or_true(condition)


def truth_of(condition: torch.SymBool) -> bool | None:
    """The truth of a condition if nothing need be assumed for it, else None."""
    if statically_known_true(condition):
        return True
    return False if statically_known_true(torch.sym_not(condition)) else None


def symbols_read_off(value: Any) -> list[tuple[sympy.Symbol, str, int, Any]]:
    """The symbols that a value has by themselves: each with what reads it ("size" of a dim, "storage_offset", or
    "number" for the value itself), the dim, and the number of torch. The symbols are those that were made, whatever has
    become known of them."""
    numbers: list[tuple[Any, str, int]] = []
    if isinstance(value, torch.SymInt):
        numbers.append((value, "number", 0))
    elif isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
        numbers += ((size, "size", dim) for dim, size in enumerate(value.shape))
        numbers.append((value.storage_offset(), "storage_offset", 0))
    return [
        (number.node._expr, read, dim, number)
        for number, read, dim in numbers
        if isinstance(number, torch.SymInt) and isinstance(getattr(number.node, "_expr", None), sympy.Symbol)
    ]


def data_symbols(value: Any) -> list[sympy.Symbol]:
    """The symbols in the sizes of a value, or in the number, that depend on data, in the order in which they occur."""
    found = [symbol for symbol, _, _, number in symbols_read_off(value)]
    return [symbol for symbol in found if free_unbacked_symbols(symbol)]


def one_symbol(env: Any, first: sympy.Symbol, last: sympy.Symbol) -> None:
    """Two symbols that depend on data are one from now on, ``last``."""
    if first not in env.replacements:
        env._rename_unbacked_to(first, last)


def forget_what_was_read(mode: Any) -> None:
    """Fake tensors of a mode give new symbols for what was read of them before."""
    mode.epoch += 1


class Assertions:
    """What a ShapeEnv assumes of numbers that depend on data, as it comes."""

    def __init__(self) -> None:
        # By identity: what is forgotten would leave its own to another.
        self._seen: dict[int, Any] = {}

    def take_new(self, env: Any) -> list[sympy.Basic]:
        """The conditions since this was last asked, in the order in which they came for each symbol; the symbols are
        those that were made, whatever has become known of them."""
        if len(self._seen) == env.num_deferred_runtime_asserts:
            return []
        every = [held for of_symbol in env.deferred_runtime_asserts.values() for held in of_symbol]
        new = [held for held in every if id(held) not in self._seen]
        self._seen.update((id(held), held) for held in new)
        # What is assumed of floats, the arithmetic of Python itself refuses: a root of what is negative.
        return [held.expr for held in new if any(symbol.is_integer for symbol in held.expr.free_symbols)]


@contextmanager
def forgotten_if_undecided(env: Any) -> Iterator[None]:
    """What is assumed inside of numbers that depend on data is forgotten again where that leads to a question about
    them that nothing answers: nobody computes on what was begun there."""
    if env is None:
        yield
        return
    asserts = {symbol: [*held] for symbol, held in env.deferred_runtime_asserts.items()}
    kept = {name: dict(getattr(env, name)) for name in ("axioms", "var_to_range", "replacements")}
    count = env.num_deferred_runtime_asserts
    try:
        yield
    except GuardOnDataDependentSymNode:
        if env.num_deferred_runtime_asserts != count:
            env.deferred_runtime_asserts, env.num_deferred_runtime_asserts = asserts, count
            for name, held in kept.items():
                # Symbols that were made inside stay known.
                setattr(env, name, {**getattr(env, name), **held} if name == "var_to_range" else held)
            env._equality_graph = env._unbacked_replacements = None
            env.fake_tensor_cache.clear()
            env._update_version_counter()
        raise


def memory_order(strides: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The dims as they lie in memory, outermost first, and the permutation back from that order."""
    order = sorted(range(len(strides)), key=lambda dim: -value_at_compilation(strides[dim]))
    return order, [order.index(dim) for dim in range(len(order))]


def repeated_dims(shape: Sequence[Any], strides: Sequence[Any]) -> list[int]:
    """The dims along which one element stands for all, as in an expanded tensor."""
    sizes = enumerate(zip(shape, strides, strict=True))
    return [d for d, (n, step) in sizes if type(step) is int and step == 0 and value_at_compilation(n) > 1]
