"""The functions of the module ``operator``: the operators by name, and the getters that it makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import call_with_numbers
from gradsplit.compile_core.capture.operations import comparisons, operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CALL_RULES, CallRule, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import SequenceValue


def _rule(call: Callable[..., Value]) -> CallRule:
    return lambda state, args, kwargs: call(state, *args, **kwargs)


for _symbol, (_function, _, _) in operators.BINARY.items():
    CALL_RULES[_function] = _rule(
        lambda state, one, other, symbol=_symbol: operators.binary(state, symbol, one, other)
    )
for _symbol, _function in operators.IN_PLACE.items():
    CALL_RULES[_function] = _rule(
        lambda state, one, other, symbol=_symbol: operators.binary(state, symbol, one, other)
    )
for _symbol, (_function, _) in operators.UNARY.items():
    CALL_RULES[_function] = _rule(lambda state, value, symbol=_symbol: operators.unary(state, symbol, value))
for _symbol, (_function, _, _) in comparisons.COMPARE.items():
    CALL_RULES[_function] = _rule(
        lambda state, one, other, symbol=_symbol: comparisons.compare(state, symbol, one, other)
    )


@call_rule(operator.index)
def _index(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return call_with_numbers(state, operator.index, args, kwargs) or fold(state, operator.index, args, kwargs)


@call_rule(operator.getitem)
def _getitem(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    owner, key = args
    return owner.get_item(state, key)


@call_rule(operator.setitem)
def _setitem(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    owner, key, value = args
    owner.set_item(state, key, value)
    return ConstantValue(None)


@call_rule(operator.delitem)
def _delitem(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    owner, key = args
    owner.delete_item(state, key)
    return ConstantValue(None)


@call_rule(operator.contains)
def _contains(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    owner, item = args
    return ConstantValue(owner.contains(state, item))


@call_rule(operator.is_)
def _is(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    one, other = args
    return ConstantValue(comparisons.is_same(state, one, other))


@call_rule(operator.is_not)
def _is_not(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    one, other = args
    return ConstantValue(not comparisons.is_same(state, one, other))


@call_rule(operator.truth)
def _truth(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    return ConstantValue(value.truth(state))


@call_rule(operator.not_)
def _not(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    (value,) = args
    return ConstantValue(not value.truth(state))


@call_rule(operator.concat)
def _concat(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    one, other = args
    return operators.binary(state, "+", one, other)


@call_rule(operator.countOf)
def _count_of(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    iterable, wanted = args
    return ConstantValue(sum(state.equal(item, wanted) for item in state.items_of(iterable)))


@call_rule(operator.indexOf)
def _index_of(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    iterable, wanted = args
    for index, item in enumerate(state.items_of(iterable)):
        if state.equal(item, wanted):
            return ConstantValue(index)
    raise state.raise_exception(ValueError, "sequence.index(x): x not in sequence")


@call_rule(operator.length_hint)
def _length_hint(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ConstantValue(args[0].length(state))


if hasattr(operator, "call"):

    @call_rule(operator.call)
    def _call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        function, *rest = args
        return function.call(state, rest, kwargs)


class GetterValue(Value):
    """``operator.itemgetter``, ``attrgetter`` or ``methodcaller`` with its arguments."""

    def __init__(self, cls: Any, args: list[Value], kwargs: dict[str, Value], source: Any = None) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.source = source

    def python_type(self) -> type:
        return self.cls

    def truth(self, state: CaptureState) -> bool:
        return True

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        (owner,) = args
        if self.cls is operator.methodcaller:
            name, *rest = self.args
            return owner.get_attribute(state, name.as_constant()).call(state, rest, self.kwargs)
        found = [self._read(state, owner, item) for item in self.args]
        return found[0] if len(found) == 1 else SequenceValue(list(found), tuple)

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
    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return GetterValue(cls, list(args), dict(kwargs))

    return call


GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
CALL_RULES.update({cls: _getter_rule(cls) for cls in GETTERS})
