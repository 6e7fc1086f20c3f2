"""Rules for ``copy.copy`` and ``copy.deepcopy`` of containers and of objects that are copied by their attributes."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.object_model.content import overrides
from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.object_model.instance_dict import InstanceDict
from gradsplit.compile_core.capture.object_model.modules import ModuleValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue
from gradsplit.compile_core.capture.values.deques import DequeValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.capture.values.sets import SetValue, as_set

# A class that defines one of these says itself how it is copied.
_OWN_WAYS = (
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)
# What copying an instance of a subclass of a container calls, besides attributes.
_FILLING = ("append", "extend", "__setitem__", "__iter__", "items")

CopyItem = Callable[[Value], Value]


answer_to(copy.copy)(lambda state, value: _copied(state, value, lambda item: item, {}))


@answer_to(copy.deepcopy)
def _deepcopy(state: CaptureState, value: Value) -> Any:
    memo: dict[int, Value] = {}

    def copy_item(item: Value) -> Value:
        found = memo.get(id(item))
        return _copied(state, item, copy_item, memo) if found is None else found

    return copy_item(value)


def _copied(state: CaptureState, value: Value, copy_item: CopyItem, memo: dict[int, Value]) -> Value:
    """A copy whose items are ``copy_item`` of the items; containers are known before their items are copied."""
    if isinstance(value, (ConstantValue, FunctionValue)):
        return value
    if isinstance(value, ReferenceValue) and isinstance(value.real, type):
        return value
    if isinstance(value, InstanceDict):
        value = value.do_copy(state)
    if isinstance(value, SequenceValue) and value.cls is tuple:
        items = [copy_item(item) for item in value.all(state)]
        same = all(one is other for one, other in zip(items, value.all(state), strict=True))
        return value if same else SequenceValue(list(items), tuple)
    if isinstance(value, SetValue):
        return as_set(state, value, set) if value.cls is set else value
    if isinstance(value, (ListValue, DictValue)):
        return _fill(state, value, _empty(state, value), copy_item, memo)
    if isinstance(value, InstanceValue) and not isinstance(value, ModuleValue):
        return _copied_instance(state, value, copy_item, memo)
    raise state.unsupported("copy", f"a copy of {value.describe()}")


def _empty(state: CaptureState, value: ListValue | DictValue) -> ListValue | DictValue:
    if isinstance(value, ListValue):
        return DequeValue([], value.limit) if isinstance(value, DequeValue) else ListValue([])
    attributes = value.changes or getattr(value.real_owner, "__dict__", None)
    if value.cls not in (dict, collections.OrderedDict, collections.defaultdict) or attributes:
        raise state.unsupported("copy", f"a copy of {value.describe()}")
    if value.cls is collections.OrderedDict and value.source is not None:
        state.guards.add([value.source], "not {0}.__dict__", [], f"{value.source} has no attributes")
    return DictValue({}, value.cls, default_factory=value.default_factory)


def _fill(
    state: CaptureState, value: Value, made: Value, copy_item: CopyItem, memo: dict[int, Value]
) -> Value:
    memo[id(value)] = made
    if isinstance(value, ListValue) and isinstance(made, ListValue):
        made.items += [copy_item(item) for item in value.all(state)]
    elif isinstance(value, DictValue) and isinstance(made, DictValue):
        value.guard_keys(state)
        for key, (key_value, _) in list(value.entries.items()):
            if not isinstance(key_value, ConstantValue):
                raise state.unsupported(
                    "copy", f"a copy of a dictionary with {key_value.describe()} as a key"
                )
            made.entries[key] = (key_value, copy_item(value.get(state, key)))
    return made


def _copied_instance(
    state: CaptureState, value: InstanceValue, copy_item: CopyItem, memo: dict[int, Value]
) -> Value:
    cls, content = value.cls, value.content
    base: Any = object if content is None else content.python_type()
    plain = not overrides(cls, object, *_OWN_WAYS) and not any(
        vars(entry).get("__slots__") for entry in cls.__mro__
    )
    if not plain or (content is not None and overrides(cls, base, *_FILLING)):
        raise state.unsupported("copy", f"a copy of {value.describe()}, which is copied in a way of its own")
    if content is not None and not isinstance(content, (ListValue, DictValue)):
        raise state.unsupported("copy", f"a copy of {value.describe()}")
    empty = None if content is None else _empty(state, content)
    made = memo[id(value)] = InstanceValue(cls, None, None, empty)
    if content is not None and empty is not None:
        _fill(state, content, empty, copy_item, memo)
    attributes = value.instance_dict(state)
    assert isinstance(attributes, InstanceDict)
    attributes.guard_keys(state)
    for name in list(attributes.entries):
        made.change(state, name, copy_item(attributes.get(state, name)))
    return made
