"""The rules for calls of particular callables, as the files of rules register them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import as_value, fold

CallRule = Callable[[CaptureState, list[Value], dict[str, Value]], Value]

CALL_RULES: dict[Any, CallRule] = {}

# What functions of torch do with arguments of which fake tensors cannot tell the result; None where neither can a rule.
DATA_DEPENDENT_RULES: dict[Any, Callable[[CaptureState, list[Value]], Value | None]] = {}


def entry_of(table: dict[Any, Any]) -> Callable[..., Callable[[Any], Any]]:
    """What makes decorators that enter a rule in a table, under each of these keys."""

    def under(*keys: Any) -> Callable[[Any], Any]:
        def enter(rule: Any) -> Any:
            table.update(dict.fromkeys(keys, rule))
            return rule

        return enter

    return under


# Register the rule for calls of these callables.
call_rule = entry_of(CALL_RULES)


def rule_of_each(*targets: Any) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register one rule for calls of several callables, which gets the one that is called before all else."""

    def register(rule: Callable[..., Value]) -> Callable[..., Value]:
        CALL_RULES.update({target: functools.partial(rule, target) for target in targets})
        return rule

    return register


def answer_to(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule written as a function of the state and the arguments by their names.

    What it gives is a constant if it is no value; arguments that it does not take end the graph.
    """

    def register(answer: Callable[..., Any]) -> Callable[..., Any]:
        def rule(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
            return as_value(answer(state, *args, **kwargs))

        CALL_RULES.update(dict.fromkeys(targets, rule))
        return answer

    return register


def fold_rule(function: Any) -> CallRule:
    """The rule of a pure function of known arguments."""
    return lambda state, args, kwargs: fold(state, function, args, kwargs)


def answers(table: Mapping[Any, Callable[..., Any]]) -> None:
    """The same for a table of functions, each with its answer."""
    for target, answer in table.items():
        answer_to(target)(answer)


# Rules for the functions that a decorator of a library makes: by their common code, with the function before all else.
DECORATOR_RULES: dict[types.CodeType, Callable[..., Value]] = {}


def decorator_rule(decorated: Any) -> Callable[[Any], Any]:
    """Register the rule for all functions that were made by the decorator that made ``decorated``."""
    return entry_of(DECORATOR_RULES)(decorated.__code__)


def find_call_rule(target: Any) -> CallRule | None:
    try:
        found = CALL_RULES.get(target)
    except TypeError:
        return None
    if found is None and isinstance(target, types.FunctionType) and target.__code__ in DECORATOR_RULES:
        return functools.partial(DECORATOR_RULES[target.__code__], target)
    return found
