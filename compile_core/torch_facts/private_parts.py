"""The private parts of torch that gradsplit relies on. Each is looked up here, once, when its area's file is imported.

A release of torch may be without one. Then there is something else in its place, if the caller of ``private`` gives
that, and one feature works less well; else a stand-in that can be imported, compared and inherited from but not called,
and nothing is compiled in this process (``missing_parts``). ``python -m gradsplit.support`` prints the table.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gradsplit.compile_core.errors import Unsupported

F = TypeVar("F", bound=Callable[[], Any])

NOTHING_IS_COMPILED = "nothing is compiled: programs run as plain Python"
PROGRAMS_RUN_PLAIN = "programs that use it run as plain Python"
# The oldest and the newest release that all tests run with.
TESTED_TORCHES = ("2.11", "2.14")


@dataclass(frozen=True)
class PrivatePart:
    """One private name of torch, as ``module:attribute``, or a fact about its objects that a search finds out: what it
    is used for, and what happens without it."""

    name: str
    purpose: str
    without: str
    find: Callable[[], Any]

    @property
    def present(self) -> bool:
        try:
            self.find()
        except LookupError:
            return False
        return True


# By name, in the order in which they were looked up.
PRIVATE_PARTS: dict[str, PrivatePart] = {}


def private(name: str, purpose: str, without: str = NOTHING_IS_COMPILED, instead: Any = None) -> Any:
    """The part of torch with this name (``module:attribute``), or what stands in its place.

    Args:
        name: as ``pkgutil.resolve_name`` takes it.
        purpose: what it is used for.
        without: what happens in a torch that has none.
        instead: what then takes its place.
    """
    find: Callable[[], Any] = bool
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        found, find = _stand_in(name) if instead is None else instead, _raise_lookup_error
    PRIVATE_PARTS[name] = PrivatePart(name, purpose, without, find)
    return found


def probed(name: str, purpose: str, without: str) -> Callable[[F], F]:
    """Decorates a function that finds a fact out, when it is first needed, and else raises a LookupError."""

    def note(find: F) -> F:
        PRIVATE_PARTS[name] = PrivatePart(name, purpose, without, find)
        return find

    return note


def missing_parts() -> list[PrivatePart]:
    """Those without which nothing is compiled, and which the torch of this process does not have."""
    return [
        part for part in PRIVATE_PARTS.values() if part.without == NOTHING_IS_COMPILED and not part.present
    ]


def _raise_lookup_error() -> None:
    raise LookupError("this release of torch has none")


def _stand_in(name: str) -> Any:
    def refuse(*_arguments: Any, **_keywords: Any) -> Any:
        raise Unsupported("missing-part-of-torch", f"this release of torch has no {name.replace(':', '.')}")

    last = name.rpartition(".")[2].rpartition(":")[2]
    if last.lstrip("_")[:1].isupper():
        return type(last, (), {"__init__": refuse})
    return refuse
