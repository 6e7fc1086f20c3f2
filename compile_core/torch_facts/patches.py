"""What is replaced in torch itself while this process runs: listed, applied and undone here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """An attribute of an object of torch's that has a value of ours; ``before`` is ``_ABSENT`` where it had none."""

    owner: Any
    name: str
    value: Any
    before: Any
    purpose: str

    def undo(self) -> None:
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


_ABSENT = object()
# In the order in which they were applied.
PATCHES: list[Patch] = []


def is_patched(owner: Any, name: str) -> bool:
    """Whether the attribute has the value that was given to it here."""
    return any(
        patch.owner is owner and patch.name == name and vars(owner).get(name) is patch.value
        for patch in PATCHES
    )


def patch(owner: Any, name: str, value: Any, purpose: str) -> None:
    """``owner.name`` is ``value`` from now on."""
    PATCHES.append(Patch(owner, name, value, vars(owner).get(name, _ABSENT), purpose))
    setattr(owner, name, value)


def undo_patches() -> None:
    """Torch is as it was: for tests, and for a process in which no compiled module is left."""
    while PATCHES:
        PATCHES.pop().undo()
