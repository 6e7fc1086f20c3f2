"""Methods of built-in types that are called through the type, as ``dict.get(d, k)`` or ``super().__setitem__(k, v)``.

The last is how a user's subclass of a container reaches its content; see ``object_model.content``.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.object_model.content import CONTENT_BASES, overrides
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.operations import comparisons, operators
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import CallRule, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, as_value, is_none
from gradsplit.compile_core.capture.values.containers import ListValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.sets import SetValue

# Gives a value, or what a constant holds.
Method = Callable[..., Any]


def fill(state: CaptureState, content: Value, *args: Value, **kwargs: Value) -> None:
    """``__init__`` of a container."""
    if isinstance(content, DictValue):
        if content.cls is collections.defaultdict and args:
            content.default_factory, args = None if is_none(args[0]) else args[0], args[1:]
        content.do_update(state, *args, **kwargs)
        return
    if kwargs:
        raise state.unsupported("class-call", f"keyword arguments of {content.describe()}")
    if isinstance(content, ListValue):
        content.do_clear(state)
        content.put(state, list(state.items_of(args[0])) if args else [])
    if isinstance(content, SetValue):
        content.do_clear(state)
        for item in state.items_of(args[0]) if args else []:
            content.do_add(state, item)


def _operator(symbol: str) -> Method:
    return lambda state, content, other: operators.binary(state, symbol, content, other)


def _reflected(symbol: str) -> Method:
    return lambda state, content, other: operators.binary(state, symbol, other, content)


def _comparison(symbol: str) -> Method:
    return lambda state, content, other: comparisons.compare(state, symbol, content, other)


_PROTOCOL: dict[str, Method] = {
    "__init__": fill,
    "__getitem__": lambda state, content, key: content.get_item(state, key),
    "__setitem__": lambda state, content, key, value: content.set_item(state, key, value),
    "__delitem__": lambda state, content, key: content.delete_item(state, key),
    "__len__": lambda state, content: content.length(state),
    "__iter__": lambda state, content: content.iterate(state),
    "__contains__": lambda state, content, item: content.contains(state, item),
    "__bool__": lambda state, content: content.truth(state),
}
for _symbol, (_, _method, _reflected_method) in operators.BINARY.items():
    _PROTOCOL[_method] = _operator(_symbol)
    _PROTOCOL[_reflected_method] = _reflected(_symbol)
    _PROTOCOL["__i" + _method[2:]] = _operator(f"{_symbol}=")
for _symbol, (_, _method, _) in comparisons.COMPARE.items():
    _PROTOCOL[_method] = _comparison(_symbol)


@call_rule(dict.__dict__["fromkeys"], collections.OrderedDict.__dict__["fromkeys"])
def _fromkeys(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, keys, *rest = args
    made = cls.call(state, [], {})
    value = rest[0] if rest else kwargs.get("value", ConstantValue(None))
    for key in state.items_of(keys):
        made.set_item(state, key, value)
    return made


# C methods of OrderedDict that call these methods of a subclass where it has its own.
_CALLED_BACK = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__missing__")
_CALLING_BACK = (
    "setdefault",
    "pop",
    "popitem",
    "copy",
    "move_to_end",
    "__eq__",
    "__ne__",
    "__or__",
    "__ior__",
    "__ror__",
)


def method_of_builtin_type(descriptor: Any) -> CallRule | None:
    """The rule of such a method, None where there is none."""
    base, name = descriptor.__objclass__, descriptor.__name__
    if base not in CONTENT_BASES:
        return None
    protocol = _PROTOCOL.get(name)

    def run(state: CaptureState, content: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if protocol is None:
            return content.call_method(state, name, args, kwargs)
        return as_value(protocol(state, content, *args, **kwargs))

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        owner, *rest = args
        if not isinstance(owner, InstanceValue):
            if not issubclass(owner.python_type(), base):
                raise state.unsupported("call-of-builtin", f"{descriptor!r} of {owner.describe()}")
            return run(state, owner, rest, kwargs)
        content = owner.content
        if content is None or not issubclass(content.python_type(), base):
            raise state.unsupported("call-of-builtin", f"{descriptor!r} of {owner.describe()}")
        if isinstance(content, DictValue):
            special = _of_mapping_subclass(state, owner, content, name, rest, kwargs)
            if special is not None:
                return special
        result = run(state, content, rest, kwargs)
        return owner if result is content else result

    return call


def _of_mapping_subclass(
    state: CaptureState,
    owner: InstanceValue,
    content: DictValue,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value | None:
    """Where a dictionary's own method calls back into the subclass; None where it does not."""
    if (
        name == "__getitem__"
        and hasattr(owner.cls, "__missing__")
        and content.cls is not collections.defaultdict
    ):
        if content.contains(state, args[0]):
            return None
        return owner.get_attribute(state, "__missing__").call(state, args, {})
    if content.cls is not collections.OrderedDict or not overrides(owner.cls, content.cls, *_CALLED_BACK):
        return None
    if name in ("__init__", "update"):
        pairs = new_pairs(state, *args, **kwargs)
        for key, value in pairs:
            owner.set_item(state, key, value)
        return ConstantValue(None)
    if name in _CALLING_BACK:
        raise state.unsupported("call-of-builtin", f"OrderedDict.{name} of {owner.describe()}")
    return None


def new_pairs(
    state: CaptureState, other: Value | None = None, /, **kwargs: Value
) -> list[tuple[Value, Value]]:
    """The pairs that ``update(other, **kwargs)`` stores."""
    collected = DictValue({})
    collected.do_update(state, other, **kwargs)
    return collected.pairs(state)
