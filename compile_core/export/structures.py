"""How the tensors of a call and of its results lie in tuples, lists, dictionaries and records: data that JSON can hold.

A structure is a dictionary with one key that says what it is: ``{"tensor": 3}`` the tensor at this position,
``{"value": x}`` a literal, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, structure], ...]}``,
``{"named": [class name, field names, structures]}`` a named tuple, ``{"record": [class name, [[field, structure],
...]]}`` an object of a class that is registered with torch's pytree and whose items have names. Classes of the
program are not there when a graph is loaded: of a named tuple another with the same fields is made, and a record
becomes a ``Record``.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

Structure = dict[str, Any]


class Record(OrderedDict[str, Any]):
    """A result with named parts, such as the outputs of transformers: by key, attribute, or position."""

    def __getattr__(self, name: str) -> Any:
        try:
            return OrderedDict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(f"the result has {', '.join(self)}, but no {name}") from None

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


_pytree.register_pytree_node(
    Record,
    lambda record: (list(record.values()), list(record)),
    lambda values, keys: Record(zip(keys, values, strict=True)),
    serialized_type_name="gradsplit.Record",
)


def describe(value: Any, leaf: Callable[[Any], Structure | None]) -> Structure:
    """The structure of a value, from ``leaf`` of what is neither a container nor a literal.

    Raises:
        TypeError: something in it has no structure; the message names its class.
    """
    found: Any = leaf(value)
    if found is not None:
        return found
    inner = functools.partial(describe, leaf=leaf)
    shape: Any = value
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return {"value": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [type(value).__name__, list(shape._fields), list(map(inner, shape))]}
    if type(value) in (tuple, list):
        return {type(value).__name__: list(map(inner, shape))}
    if type(value) in (dict, OrderedDict):
        return {"dict": [[_key(key), inner(item)] for key, item in shape.items()]}
    if type(value) in _pytree.SUPPORTED_NODES and isinstance(value, dict):
        # Attributes of such a class are its items, or None where it has no item of the name.
        return {"record": [type(value).__name__, [[_key(key), inner(item)] for key, item in value.items()]]}
    raise TypeError(type(value).__name__)


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"dictionary with a key of {type(key).__name__}")
    return key


def build(structure: Structure, tensors: Sequence[Any]) -> Any:
    """A value of this structure."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "tuple":
        return tuple([build(item, tensors) for item in content])
    if kind == "list":
        return [build(item, tensors) for item in content]
    if kind == "dict":
        return {key: build(item, tensors) for key, item in content}
    if kind == "named":
        return _named_tuple(content[0], tuple(content[1]))(*[build(item, tensors) for item in content[2]])
    return Record([(key, build(item, tensors)) for key, item in content[1]])


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    return namedtuple(name, fields)  # type: ignore[misc]


def collect(structure: Structure, value: Any, place: str, found: list[torch.Tensor]) -> None:
    """Append the tensors of a value in the order of the structure.

    Raises:
        ValueError: the value has another structure; the message says where.
    """
    ((kind, content),) = structure.items()
    if kind == "tensor":
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{place} is a {type(value).__name__}; the exported graph takes a tensor there")
        found.append(value)
    elif kind == "value":
        if type(value) is not type(content) or value != content:
            raise ValueError(
                f"{place} is {_short(value)}; the graph was exported with {content!r}, which it is made for"
            )
    elif kind in ("tuple", "list", "named"):
        items = content[2] if kind == "named" else content
        if not isinstance(value, list if kind == "list" else tuple) or len(value) != len(items):
            raise ValueError(
                f"{place} is {_short(value)}; the graph was exported with a {kind} of {len(items)} items"
            )
        for index, item in enumerate(items):
            collect(item, value[index], f"{place}[{index}]", found)
    else:
        entries = content if kind == "dict" else content[1]
        if not isinstance(value, dict) or set(value) != {key for key, _ in entries}:
            keys = [key for key, _ in entries]
            raise ValueError(
                f"{place} is {_short(value)}; the graph was exported with a dictionary of the keys {keys}"
            )
        for key, item in entries:
            collect(item, value[key], f"{place}[{key!r}]", found)


def _short(value: Any) -> str:
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)} items"
    return (
        repr(value)
        if value is None or isinstance(value, (bool, int, float, str))
        else f"a {type(value).__name__}"
    )
