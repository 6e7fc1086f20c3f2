"""Generated Python that reads sources: one temporary for each source read, one global for each constant held."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.ir.sources import Reference, Source


class SourceWriter:
    """Collects lines; ``constants`` are the globals that they need."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._read: dict[Source, str] = {}

    def constant(self, value: Any) -> str:
        """The global that holds a value."""
        name = self._constant_names.get(id(value))
        if name is None:
            name = self._constant_names[id(value)] = f"c{len(self.constants)}"
            self.constants[name] = value
        return name

    def read(self, source: Source) -> str:
        """The name of what a source holds; sources that share a base read it once."""
        name = self._read.get(source)
        if name is None:
            base = "" if source.base is None else self.read(source.base)
            name = source.expression(base, self._reference)
            if source.key_source is not None:
                name = name.replace("{key}", self.read(source.key_source))
            if not name.isidentifier():
                name = self.bind(name)
            self._read[source] = name
        return name

    def bind(self, expression: str) -> str:
        """A temporary that holds an expression."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _reference(self, reference: Reference) -> str:
        return self.constant(reference.value)


def evaluate(text: str, name: str, constants: dict[str, Any]) -> Any:
    """Run generated source and return what it binds to this name."""
    namespace = dict(constants)
    exec(compile(text, f"<generated {name}>", "exec"), namespace)
    return namespace[name]


def compile_function(text: str, name: str, constants: dict[str, Any]) -> Callable[..., Any]:
    """Compile generated source and return the function of this name."""
    function = evaluate(text, name, constants)
    assert isinstance(function, types.FunctionType)
    return function
