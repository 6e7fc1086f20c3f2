"""The rules for calls of particular callables, as the files of rules register them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value

CallRule = Callable[[CaptureState, list[Value], dict[str, Value]], Value]

CALL_RULES: dict[Any, CallRule] = {}


def call_rule(*targets: Any) -> Callable[[CallRule], CallRule]:
    """Register the rule for calls of these callables."""

    def register(function: CallRule) -> CallRule:
        for target in targets:
            CALL_RULES[target] = function
        return function

    return register


# Rules for the functions that a decorator of a library makes: by their common code, given the function.
DecoratorRule = Callable[[types.FunctionType], CallRule]
DECORATOR_RULES: dict[types.CodeType, DecoratorRule] = {}


def decorator_rule(decorated: Any) -> Callable[[DecoratorRule], DecoratorRule]:
    """Register the rule for all functions that were made by the decorator that made ``decorated``."""

    def register(function: DecoratorRule) -> DecoratorRule:
        DECORATOR_RULES[decorated.__code__] = function
        return function

    return register


def find_call_rule(target: Any) -> CallRule | None:
    try:
        found = CALL_RULES.get(target)
    except TypeError:
        return None
    if found is None and isinstance(target, types.FunctionType) and target.__code__ in DECORATOR_RULES:
        return DECORATOR_RULES[target.__code__](target)
    return found
