"""Messages for people: warnings, and records of logs whose level is switched on.

They are effects: given in their order once the graph has run, as from the line where the program gives them. The runner
names that line instead of looking for it among the frames, so a message that is to name a caller's ends the graph, as
one does whose text depends on data.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import SymbolicNumber
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue


@answer_to(logging.Logger.isEnabledFor)
def _is_enabled(state: CaptureState, logger: Value, asked: Value) -> bool:
    """Whether a logger handles a level, which is guarded."""
    level = asked.as_constant()
    if not isinstance(logger, InstanceValue) or logger.real is None:
        raise state.unsupported("logging", f"a call of {logger.describe()}")
    enabled = logger.real.isEnabledFor(level)
    place = logger.source or state.reference_source(logger.real.name, logger.real)
    negation = "" if enabled else "not "
    text = f"{place} is {negation}enabled for {logging.getLevelName(level)}"
    state.guards.add([place], f"{negation}{{0}}.isEnabledFor({level})", [], text)
    return enabled


def _constants(state: CaptureState, values: list[Value]) -> list[Any]:
    try:
        return [value.as_constant() for value in values]
    except NotConstant:
        shown = ", ".join(value.describe() for value in values)
        raise state.unsupported(
            "message", f"a message of {shown}", "leave out what depends on data"
        ) from None


@answer_to(logging.Logger._log)
def _log(state: CaptureState, logger: Value, level: Value, msg: Value, args: Value, **options: Value) -> Any:
    """``handle`` and ``makeRecord`` may be the program's own."""
    own = getattr(logger, "real", None)
    if options or own is None:
        raise state.unsupported("logging", "a log of more than a message", "log without the arguments")
    message = [msg, *state.items_of(args)]
    _constants(state, [value for value in message if not isinstance(value, SymbolicNumber)])
    if type(own).findCaller is not logging.Logger.findCaller:
        raise state.unsupported("logging", f"{type(own).__qualname__} finds callers in a way of its own")
    number = level.as_constant()
    place = next(f.location() for f in reversed(state.frames) if f.module_name() != "logging")

    def write_record(text: Any, *args: Any) -> None:
        given = (number, place.filename, place.line, text, args, None, place.function)
        own.handle(own.makeRecord(own.name, *given))

    state.effects.message_given(write_record, message)
    return None


@call_rule(*(logging.debug, logging.info, logging.warning, logging.error, logging.critical, logging.log))
def _leave_to_python(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    raise state.unsupported(
        "logging", "a function of logging that may write", "log outside of the compiled function"
    )


def _action(text: str, category: type[Warning], module: str, line: int) -> str:
    """What ``warnings`` does with a warning by its filters."""
    for action, message, kind, where, number in warnings.filters:
        matches = message is None or (message == text if isinstance(message, str) else message.match(text))
        here = where is None or (where == module if isinstance(where, str) else where.match(module))
        if matches and here and issubclass(category, kind) and number in (0, line):
            return action
    return vars(warnings)["defaultaction"]


@answer_to(warnings.warn)
def _warn(state: CaptureState, message: Value, category: Value | None = None, **others: Value) -> Any:
    level = others.pop("stacklevel", ConstantValue(1))
    text, kind, level = _constants(state, [message, category or ConstantValue(None), level])
    kind = kind or UserWarning
    if (
        others
        or level > 1
        or type(text) is not str
        or not (isinstance(kind, type) and issubclass(kind, Warning))
    ):
        raise state.unsupported("warning", "a warning that is more than a text at the line that gives it")
    known = state.known.get(id(warnings.filters))
    if known is not None and id(known[1]) in state.effects.containers:
        raise state.unsupported("warning", "a warning where the program changes the filters")
    frame = state.frames[-1]
    scope, place = frame.function.scope, frame.location()
    module = scope.get("__name__") or "<string>"
    where = (text, kind, module, place.line)
    raises = _action(*where) == "error"
    shown = f"{kind.__name__} of line {place.line} is {'an error' if raises else 'no error'}"
    state.guards.add([], "({c0}(*{c1}) == 'error') is {c2}", [_action, where, raises], shown)
    if raises:
        raise state.raise_exception(kind, text)

    def give_warning() -> None:
        registry = scope.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, kind, place.filename, place.line, module, registry)

    state.effects.message_given(give_warning, [])
    return None


# It makes a logger where there is none, as any later call would.
@answer_to(logging.getLogger)
def _get_logger(state: CaptureState, name: Value | None = None) -> Value:
    real = logging.getLogger(None if name is None else name.as_constant())
    return state.wrap(real, state.reference_source(real.name, real))
