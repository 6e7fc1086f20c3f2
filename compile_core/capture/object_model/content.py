"""Instances of user-defined subclasses of built-in containers and literals, as Hugging Face's ``ModelOutput`` is.

Such an object is an ``InstanceValue`` with a content: a value of the built-in base. Methods of the user's class run
as of any class; those that it inherits from the base work on the content, and change the real object by the base's
own methods, so that no method of the user runs twice.
"""

from __future__ import annotations

import collections

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import ContainerValue

_MAPPINGS = (collections.OrderedDict, collections.defaultdict, dict)
_LITERALS = (str, bytes, int, float, complex)
CONTENT_BASES = (*_MAPPINGS, list, tuple, set, frozenset, *_LITERALS)
_HEAP_TYPE = 1 << 9


def content_base(cls: type) -> type | None:
    """The built-in base whose content the instances of a user-defined class have, None where there is none.

    A class that mixes in another built-in layout has none.
    """
    found = next((base for base in cls.__mro__ if base in CONTENT_BASES), None)
    if found is None or found is cls:
        return None
    known = (*found.__mro__, object)
    return found if all(entry in known or entry.__flags__ & _HEAP_TYPE for entry in cls.__mro__) else None


def make_content(state: CaptureState, base: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What ``base.__new__(cls, *args)`` puts into a new object; ``__init__`` fills mutable containers."""
    is_mutable = base in (*_MAPPINGS, list, set)
    made = state.wrap(base, None).call(state, [] if is_mutable else args, {} if is_mutable else kwargs)
    if isinstance(made, (ConstantValue, ContainerValue)) and made.python_type() is base:
        return made
    raise state.unsupported("class-call", f"{base.__name__}.__new__ gives {made.describe()}")


def overrides(cls: type, base: type, *names: str) -> bool:
    """Whether a subclass replaces one of these methods of its built-in base."""
    return any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)
