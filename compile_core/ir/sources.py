"""Sources: where a value that existed before the call is found again at the next call.

A source is a path of steps from an argument of the captured frame, or from an object that the compiled
function holds on to (a globals dictionary, a closure cell, a class), to the value. Each prints as a Python
expression, from which the guard check and the fetching of the graph's inputs are generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Reference:
    """An object held by the compiled function itself; compared by identity of the reference."""

    label: str
    value: Any


NameOf = Callable[[Reference], str]


@dataclass(frozen=True)
class Source:
    """One step of a path. ``base`` is the path before it, None at a root."""

    @property
    def base(self) -> Source | None:
        return None

    @property
    def root(self) -> Source:
        """Where the path begins."""
        return self if self.base is None else self.base.root

    @property
    def key_source(self) -> Source | None:
        """A second path that the step needs, whose text stands for ``{key}`` in the expression."""
        return None

    def expression(self, base: str, name_of: NameOf) -> str:
        """Python text of this step, given the text of the base and the names of the held objects."""
        raise NotImplementedError

    def __str__(self) -> str:
        base = "" if self.base is None else str(self.base)
        text = self.expression(base, lambda reference: reference.label)
        return text if self.key_source is None else text.replace("{key}", str(self.key_source))


@dataclass(frozen=True)
class LocalSource(Source):
    """An argument of the frame."""

    name: str

    def expression(self, base: str, name_of: NameOf) -> str:
        return variable_of(self.name)

    def __str__(self) -> str:
        return self.name


def variable_of(parameter: str) -> str:
    """The variable that holds an argument in generated Python."""
    return f"l_{identifier_of(parameter)}"


def identifier_of(name: str) -> str:
    """A name that source text can hold: comprehensions and rewritten code have others, such as ``.0``."""
    return re.sub(r"\W", lambda found: f"_{ord(found[0])}_", name)


@dataclass(frozen=True)
class ReferenceSource(Source):
    """An object that the compiled function holds."""

    reference: Reference

    def expression(self, base: str, name_of: NameOf) -> str:
        return name_of(self.reference)


@dataclass(frozen=True)
class GlobalSource(Source):
    """A global variable; the scope refers to the globals dictionary of a function."""

    scope: Reference
    name: str

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{name_of(self.scope)}[{self.name!r}]"


@dataclass(frozen=True)
class _Step(Source):
    parent: Source

    @property
    def base(self) -> Source | None:
        return self.parent


@dataclass(frozen=True)
class AttributeSource(_Step):
    """``parent.name``."""

    name: str

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}.{self.name}"

    def __str__(self) -> str:
        return str(self.parent) if self.name == "cell_contents" else super().__str__()


@dataclass(frozen=True)
class OwnDictSource(_Step):
    """The ``__dict__`` of an object whose class defines ``__getattribute__``, which must not run here."""

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"object.__getattribute__({base}, '__dict__')"

    def __str__(self) -> str:
        return f"{self.parent}.__dict__"


@dataclass(frozen=True)
class ItemSource(_Step):
    """``parent[key]`` for a key that is a literal.

    ``variable`` is the name of the variable whose cell it is, if it is one: what messages call it.
    """

    key: Any
    variable: str = field(default="", compare=False)

    def expression(self, base: str, name_of: NameOf) -> str:
        prints = type(self.key) in (str, int, bool, bytes, type(None))
        return f"{base}[{repr(self.key) if prints else name_of(Reference(repr(self.key), self.key))}]"

    def __str__(self) -> str:
        if self.variable:
            return self.variable
        holder = self.parent
        is_own = isinstance(holder, OwnDictSource) or (
            isinstance(holder, AttributeSource) and holder.name == "__dict__"
        )
        return f"{holder.base}.{self.key}" if is_own else super().__str__()


_ABSENT = Reference("absent", object())


@dataclass(frozen=True)
class EntrySource(_Step):
    """``parent[key]`` of a dictionary where ``key`` is an object that is itself found by a source.

    Reading it makes no entry in a ``defaultdict``: a missing key gives an object that no guard accepts.
    """

    key: Source

    @property
    def key_source(self) -> Source | None:
        return self.key

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}.get({{key}}, {name_of(_ABSENT)})"

    def __str__(self) -> str:
        return f"{self.parent}[{self.key}]"


@dataclass(frozen=True)
class KeysSource(_Step):
    """The keys of a dictionary, in order."""

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"tuple({base})"


@dataclass(frozen=True)
class KeySource(_Step):
    """One of the keys of a dictionary; ``parent`` is their ``KeysSource``."""

    index: int

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}[{self.index}]"


@dataclass(frozen=True)
class ContentSource(_Step):
    """What an instance of a user's subclass of a container holds: the same object, read by the methods of ``cls``,
    the built-in base, so that no method of the user's class runs."""

    cls: type

    def expression(self, base: str, name_of: NameOf) -> str:
        return base

    def __str__(self) -> str:
        return str(self.parent)


@dataclass(frozen=True)
class ContentItemSource(_Step):
    """``cls.__getitem__(parent, key)`` for one of the built-in containers that subclasses may have as base."""

    base_name: str
    key: Any

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{self.base_name}.__getitem__({base}, {self.key!r})"

    def __str__(self) -> str:
        return f"{self.parent}[{self.key!r}]"


@dataclass(frozen=True)
class CallSource(_Step):
    """``parent()``, for weak references."""

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}()"


@dataclass(frozen=True)
class ModuleEntrySource(_Step):
    """A parameter, buffer or submodule: ``parent.__dict__[table][key]``."""

    table: str
    key: str

    @property
    def base(self) -> Source | None:
        return ItemSource(AttributeSource(self.parent, "__dict__"), self.table)

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}[{self.key!r}]"

    def __str__(self) -> str:
        return f"{self.parent}.{self.key}"


@dataclass(frozen=True)
class ConvertedSource(_Step):
    """``function(parent)``: what an object becomes on its way into the graph, as the tensor of an array."""

    function: Reference

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{name_of(self.function)}({base})"

    def __str__(self) -> str:
        return str(self.parent)


def container_item(container: Source, key: Any) -> Source:
    """An item of a list, tuple or dictionary that lies at a source."""
    if isinstance(container, ContentSource):
        name = next(base.__name__ for base in (dict, list, tuple) if issubclass(container.cls, base))
        return ContentItemSource(container.parent, name, key)
    return ItemSource(container, key)


def path_words(source: Source) -> list[str]:
    """The names along a path, for readable placeholder names."""
    if isinstance(source, LocalSource):
        return [source.name]
    if isinstance(source, GlobalSource):
        return [source.name]
    if isinstance(source, ReferenceSource):
        return [source.reference.label]
    if isinstance(source, ModuleEntrySource):
        return [*path_words(source.parent), source.key]
    assert isinstance(source, _Step)
    if isinstance(source, EntrySource):
        return [*path_words(source.parent), *path_words(source.key)[-1:]]
    before = path_words(source.parent)
    if isinstance(source, KeySource):
        return [*before, str(source.index)]
    if isinstance(source, (CallSource, OwnDictSource, ContentSource, KeysSource, ConvertedSource)):
        return before
    if isinstance(source, AttributeSource):
        return before if source.name in ("__dict__", "cell_contents") else [*before, source.name]
    assert isinstance(source, (ItemSource, ContentItemSource))
    return before if source.key in ("_parameters", "_buffers", "_modules") else [*before, str(source.key)]
