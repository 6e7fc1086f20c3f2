"""Logging: a call that the level switches off does nothing, every other one is left to Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue


def _is_enabled(state: CaptureState, logger: Value, level: int) -> bool:
    """Whether a logger handles a level, which is guarded."""
    if not isinstance(logger, InstanceValue) or logger.real is None:
        raise state.unsupported("logging", f"a call of {logger.describe()}")
    enabled = logger.real.isEnabledFor(level)
    place = logger.source or state.reference_source(logger.real.name, logger.real)
    negation = "" if enabled else "not "
    text = f"{place} is {negation}enabled for {logging.getLevelName(level)}"
    state.guards.add([place], f"{negation}{{0}}.isEnabledFor({level})", [], text)
    return enabled


answer_to(logging.Logger.isEnabledFor)(
    lambda state, logger, level: _is_enabled(state, logger, level.as_constant())
)


def _level_rule(function: Callable[..., Any], level: int | None) -> CallRule:
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        wanted = args[1].as_constant() if level is None else level
        if _is_enabled(state, args[0], wanted):
            raise state.unsupported(
                "logging", f"{function.__qualname__} writes a record", "log outside of the compiled function"
            )
        return ConstantValue(None)

    return call


for _name, _level in (
    ("debug", logging.DEBUG),
    ("info", logging.INFO),
    ("warning", logging.WARNING),
    ("error", logging.ERROR),
    ("exception", logging.ERROR),
    ("critical", logging.CRITICAL),
    ("log", None),
):
    _function = getattr(logging.Logger, _name)
    CALL_RULES[_function] = _level_rule(_function, _level)


def _leave_to_python(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    raise state.unsupported(
        "logging", "a function of logging that may write", "log outside of the compiled function"
    )


for _function in (logging.debug, logging.info, logging.warning, logging.error, logging.critical, logging.log):
    CALL_RULES[_function] = _leave_to_python
