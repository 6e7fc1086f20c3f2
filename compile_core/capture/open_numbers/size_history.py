"""Which sizes and numbers are open: what the user said, and which differed between the calls so far.

With ``dynamic=None`` everything is static first. A function remembers what it saw at each source; a size, stride,
integer or float that differs at a later capture is open from then on. The memory is by the text of the source: should
two sources share a text, a size is open that need not be, which is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.ir.sources import LocalSource, ModuleEntrySource, Source

# Sizes 0 and 1 broadcast and change what is contiguous, so an entry is compiled for each of them.
SPECIAL_SIZES = (0, 1)
_INT64 = range(-(1 << 63), 1 << 63)


class SizeHistory:
    """The policy of one compiled function.

    Args:
        dynamic: None for static first, True for all sizes open from the first call on, False for never.
    """

    def __init__(self, dynamic: bool | None = None) -> None:
        self.dynamic = dynamic
        self._seen: dict[tuple[Any, ...], list[float | str]] = {}
        self._changed: dict[tuple[Any, ...], set[int]] = {}

    def open_sizes(self, source: Source, sizes: Sequence[int]) -> set[int]:
        """The open dims of the tensor at ``source``, which now has these sizes."""
        if self.dynamic is False or isinstance(source, ModuleEntrySource):
            return set()
        changed = self._note(("sizes", str(source), len(sizes)), sizes)
        if self.dynamic is True:
            return set(range(len(sizes)))
        return set(changed)

    def open_strides(self, source: Source, strides: Sequence[int]) -> set[int]:
        """The dims whose strides follow from nothing else and were seen to differ."""
        if self.dynamic is False:
            return set()
        return set(self._note(("strides", str(source), len(strides)), strides))

    def is_open(self, source: Source, value: int) -> bool:
        """Whether the integer at ``source`` is open; those of modules are only once they differed."""
        if self.dynamic is False:
            return False
        changed = self._note(("integer", str(source)), [value])
        if value in SPECIAL_SIZES or value not in _INT64:
            return False
        return bool(changed) or (self.dynamic is True and _is_argument(source))

    def is_open_float(self, source: Source, value: float) -> bool:
        """Whether the float at ``source`` is open: once it differed, also under ``dynamic=True``, since programs are
        full of floats that never do. The text tells 0.0 from -0.0, and takes nan for itself."""
        return self.dynamic is not False and bool(self._note(("float", str(source)), [repr(value)]))

    def note_differs(self, source: Source) -> None:
        """The integer at ``source``, if it is one, will be another in the next call."""
        self._changed.setdefault(("integer", str(source)), set()).add(0)

    def has_changed(self, source: Source, value: str) -> bool:
        """Whether the string at ``source`` has differed between calls."""
        return bool(self._note(("literal", str(source)), [value]))

    def has_grown(self, source: Source, length: int) -> bool:
        """Whether the length of the list at ``source`` has differed between calls."""
        return bool(self._note(("length", str(source)), [length]))

    def _note(self, key: tuple[Any, ...], values: Sequence[float | str]) -> set[int]:
        seen = self._seen.setdefault(key, list(values))
        changed = self._changed.setdefault(key, set())
        fresh = [k for k, value in enumerate(values) if value != seen[k] and k not in changed]
        changed.update(fresh)
        for k in fresh:
            log_artifact("dynamic", lambda k=k: f"{key[0]} of {key[1]}: {seen[k]} was first, now {values[k]}")
        return changed


def _is_argument(source: Source) -> bool:
    """Whether an object is an argument, or an item of containers that are: not an attribute of an object."""
    root: Source = source
    while root.base is not None:
        if root.expression("", lambda reference: "").startswith("."):
            return False
        root = root.base
    return isinstance(root, LocalSource)
