"""The functions of the module ``operator``: the operators by name, and the getters that it makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.operations import comparisons, operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import (
    CALL_RULES,
    CallRule,
    answer_to,
    answers,
)
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue


def _operator_rule(operate: Callable[..., Value], symbol: str) -> CallRule:
    return lambda state, args, kwargs: operate(state, symbol, *args, **kwargs)


for _operate, _symbols in (
    (operators.binary, {symbol: row[0] for symbol, row in operators.BINARY.items()} | operators.IN_PLACE),
    (operators.unary, {symbol: row[0] for symbol, row in operators.UNARY.items()}),
    (comparisons.compare, {symbol: row[0] for symbol, row in comparisons.COMPARE.items()}),
):
    CALL_RULES.update({_symbols[symbol]: _operator_rule(_operate, symbol) for symbol in _symbols})
answers(
    {
        operator.getitem: lambda state, owner, key: owner.get_item(state, key),
        operator.setitem: lambda state, owner, key, value: owner.set_item(state, key, value),
        operator.delitem: lambda state, owner, key: owner.delete_item(state, key),
        operator.contains: lambda state, owner, item: owner.contains(state, item),
        operator.is_: lambda state, one, other: comparisons.is_same(state, one, other),
        operator.is_not: lambda state, one, other: not comparisons.is_same(state, one, other),
        operator.truth: lambda state, value: value.truth(state),
        operator.not_: lambda state, value: not value.truth(state),
        operator.concat: lambda state, one, other: operators.binary(state, "+", one, other),
        operator.countOf: lambda state, iterable, wanted: sum(
            state.equal(item, wanted) for item in state.items_of(iterable)
        ),
        operator.length_hint: lambda state, value, default=None: value.length(state),
        operator.call: lambda state, function, *args, **kwargs: function.call(state, list(args), kwargs),
    }
)


@answer_to(operator.indexOf)
def _index_of(state: CaptureState, iterable: Value, wanted: Value) -> Any:
    for index, item in enumerate(state.items_of(iterable)):
        if state.equal(item, wanted):
            return ConstantValue(index)
    raise state.raise_exception(ValueError, "sequence.index(x): x not in sequence")


class GetterValue(Value):
    """``operator.itemgetter``, ``attrgetter`` or ``methodcaller`` with its arguments."""

    def __init__(self, cls: Any, args: list[Value], kwargs: dict[str, Value], source: Any = None) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.source = source

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        (owner,) = args
        if self.cls is operator.methodcaller:
            name, *rest = self.args
            return owner.get_attribute(state, name.as_constant()).call(state, rest, self.kwargs)
        found = [self._read(state, owner, item) for item in self.args]
        return found[0] if len(found) == 1 else SequenceValue(list(found), tuple)

    def rebuild(self, writer: Any) -> str | None:
        return writer.made(self.cls, *self.args, **self.kwargs)

    def _read(self, state: CaptureState, owner: Value, item: Value) -> Value:
        if self.cls is operator.itemgetter:
            return owner.get_item(state, item)
        for name in item.as_constant().split("."):
            owner = owner.get_attribute(state, name)
        return owner


def existing_getter(state: CaptureState, real: Any, source: Any) -> GetterValue:
    """The value of a getter that was made before the call; it is guarded by its identity."""
    maker, args = real.__reduce__()
    # A method caller with keywords is pickled as a partial application of its class.
    args = (*getattr(maker, "args", ()), *args)
    kwargs: dict[str, Any] = getattr(maker, "keywords", {})
    named = {name: state.wrap(value, None) for name, value in kwargs.items()}
    return GetterValue(type(real), [state.wrap(value, None) for value in args], named, source)


def _getter_rule(cls: Any) -> CallRule:
    return lambda state, args, kwargs: GetterValue(cls, list(args), dict(kwargs))


GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
CALL_RULES.update({cls: _getter_rule(cls) for cls in GETTERS})
