"""What a captured call changes of things that existed before it, as final states to be stored after the
graph ran."""

from __future__ import annotations

from typing import Any

from compile_core.capture.base import Value


class SideEffects:
    """Changed containers, attributes, cells and globals, each in the order of its first change.

    Only the final state of each is kept: nothing runs between the changes that could see the states between.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Value] = {}
        self.attributes: dict[tuple[int, str], Value] = {}
        self.cells: dict[int, Value] = {}
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], Value]] = {}

    def container_changed(self, container: Value) -> None:
        if container.source is not None:
            self.containers[id(container)] = container

    def attribute_changed(self, owner: Value, name: str) -> None:
        if owner.source is not None:
            self.attributes[(id(owner), name)] = owner

    def cell_changed(self, cell: Value) -> None:
        self.cells[id(cell)] = cell

    def global_changed(self, scope: dict[str, Any], name: str, value: Value) -> None:
        self.globals[(id(scope), name)] = (scope, value)

    def stored_global(self, scope: dict[str, Any], name: str) -> Value | None:
        found = self.globals.get((id(scope), name))
        return None if found is None else found[1]

    def __bool__(self) -> bool:
        return bool(self.containers or self.attributes or self.cells or self.globals)
