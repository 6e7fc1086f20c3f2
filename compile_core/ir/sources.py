"""Sources: where a value that existed before the call is found again at the next call.

A source is a path of steps from an argument of the captured frame, or from an object that the compiled
function holds on to (a globals dictionary, a closure cell, a class), to the value. Each prints as a Python
expression, from which the guard check and the fetching of the graph's inputs are generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    def expression(self, base: str, name_of: NameOf) -> str:
        """Python text of this step, given the text of the base and the names of the held objects."""
        raise NotImplementedError

    def __str__(self) -> str:
        base = "" if self.base is None else str(self.base)
        return self.expression(base, lambda reference: reference.label)


@dataclass(frozen=True)
class LocalSource(Source):
    """An argument of the frame."""

    name: str

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"l_{self.name}"

    def __str__(self) -> str:
        return self.name


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


@dataclass(frozen=True)
class ItemSource(_Step):
    """``parent[key]`` for a key that is a literal."""

    key: Any

    def expression(self, base: str, name_of: NameOf) -> str:
        return f"{base}[{self.key!r}]"


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


def instance_attribute(owner: Source, name: str) -> Source:
    """An attribute that lies in the object's own ``__dict__``, read without running descriptors."""
    return ItemSource(AttributeSource(owner, "__dict__"), name)


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
    before = path_words(source.parent)
    if isinstance(source, CallSource):
        return before
    if isinstance(source, AttributeSource):
        return before if source.name in ("__dict__", "cell_contents") else [*before, source.name]
    assert isinstance(source, ItemSource)
    return before if source.key in ("_parameters", "_buffers", "_modules") else [*before, str(source.key)]
