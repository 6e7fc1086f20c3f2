"""What a captured call changes of things that existed before it, as final states to be stored after the
graph ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradsplit.compile_core.capture.values.base import Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.errors import Unsupported


class SideEffects:
    """Changed containers, attributes, cells and globals, each in the order of its first change.

    Only the final state of each is kept: nothing runs between the changes that could see the states between.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Value] = {}
        self.attributes: dict[tuple[int, str], Value] = {}
        self.cells: dict[int, Value] = {}
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], Value]] = {}
        # Iterators and generators of random numbers, which ``move`` as the call made them.
        self.moved: dict[int, Value] = {}
        # Attributes stored in classes, MISSING where they were deleted.
        self.classes: dict[tuple[type, str], Value] = {}
        # Warnings and records of logs: functions with their arguments, in the order of the calls.
        self.messages: list[tuple[Callable[..., None], Sequence[Value]]] = []
        # Leaves whose old gradients the program lets go of before a backward stores new ones.
        self.freed_gradients: list[Value] = []
        self._body_began: int | None = None

    @contextmanager
    def only_own_values(self) -> Iterator[None]:
        """Refuse changes of anything that was there before: a graph of its own cannot make them."""
        began = self._body_began
        self._body_began = Value().serial
        try:
            yield
        finally:
            self._body_began = began

    def _check_own(self, changed: Value | None) -> None:
        if self._body_began is None:
            return
        if changed is None or changed.source is not None or changed.serial < self._body_began:
            shown = "a global variable" if changed is None else changed.describe()
            raise Unsupported(
                "side-effect-in-body",
                f"a function that becomes a graph of its own changes {shown}, which lies outside of it",
                "return what the function computes instead of storing it",
            )

    def container_changed(self, container: Value) -> None:
        self._check_own(container)
        if container.source is not None:
            self.containers[id(container)] = container

    def attribute_changed(self, owner: Value, name: str) -> None:
        self._check_own(owner)
        if owner.source is not None:
            self.attributes[(id(owner), name)] = owner

    def moved_on(self, value: Value) -> None:
        self._check_own(value)
        if value.source is not None:
            self.moved[id(value)] = value

    def class_changed(self, cls: type, name: str, value: Value) -> None:
        self._check_own(None)
        self.classes[(cls, name)] = value

    def message_given(self, give: Callable[..., None], arguments: Sequence[Value]) -> None:
        self._check_own(None)
        self.messages.append((give, arguments))

    def cell_changed(self, cell: Value) -> None:
        self._check_own(cell)
        if cell.source is not None:
            self.cells[id(cell)] = cell

    def global_changed(self, scope: dict[str, Any], name: str, value: Value) -> None:
        self._check_own(None)
        self.globals[(id(scope), name)] = (scope, value)

    def stored_global(self, scope: dict[str, Any], name: str) -> Value | None:
        found = self.globals.get((id(scope), name))
        return None if found is None else found[1]

    def changes(self) -> Iterator[str]:
        """In words, what will be other than it was; not what is stored anew and equals what was there."""
        for container in self.containers.values():
            yield f"the content of {container.source}"
        for value in self.moved.values():
            yield f"where {value.source} stands"
        for (_, name), owner in self.attributes.items():
            now: Any = getattr(owner, "changes", {}).get(name)
            real_dict = getattr(owner, "real_dict", dict)
            before = real_dict().get(name, self)
            if not _is_constant(now, before):
                yield f"{owner.source}.{name}"
        for cell in self.cells.values():
            yield f"the variable {cell.source}"
        for (_, name), (scope, now) in self.globals.items():
            if not _is_constant(now, scope.get(name, self)):
                yield f"the global variable {name}"
        for cls, name in self.classes:
            yield f"{cls.__qualname__}.{name}"
        if self.messages:
            yield "what is warned of or logged"

    def may_have_let_go(self) -> bool:
        """Whether something that was there may have been dropped: other than numbers and texts."""
        before: list[Any] = [scope.get(name) for (_, name), (scope, _) in self.globals.items()]
        for (_, name), owner in self.attributes.items():
            own = getattr(owner, "real_dict", None)
            before.append(self if own is None else own().get(name))
        plain = all(isinstance(value, (type(None), bool, int, float, str)) for value in before)
        return bool(self.containers or self.cells or self.classes) or not plain

    def __bool__(self) -> bool:
        states = (self.containers, self.moved, self.attributes, self.cells, self.globals, self.classes)
        return any(states) or bool(self.messages)


def _is_constant(now: Any, before: Any) -> bool:
    """Whether a symbolic value is the very constant that was there before. An open number is none, and must not be
    asked for its value: that would close it."""
    if type(now) is not ConstantValue:
        return False
    value = now.value
    return value is before or (
        type(value) is type(before) and type(value) in (bool, int, str) and value == before
    )
