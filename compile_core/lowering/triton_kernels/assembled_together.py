"""Machine code of several kernels by one start of NVIDIA's assembler, which takes as long as a small kernel's code.

Triton assembles each kernel by itself. Here it is stopped before that, what it has written of some kernels is joined to
one text, and Triton's own function makes machine code of that, with the options that it would have chosen. The code of
each kernel is what it would be alone; it is found by its name in that of all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What stands once at the head of a text, and what may be declared once in it.
_HEAD = re.compile(r"^\.(?:version|target|address_size)\b.*\n", re.MULTILINE)
_DECLARATION = re.compile(r"^\.extern\b.*;[^\n]*\n", re.MULTILINE)
# What a text defines beside its kernel: a table that a function of a library reads, or what is left of such.
_VARIABLE = re.compile(r"^\.(?:global|const)\b[^\n=;]*?([\w$]+)\[.*\n", re.MULTILINE)
_NAME = re.compile(r"[\w$]+")
# Of options, those that are in the text already.
_IN_THE_TEXT = ("num_warps", "num_stages")


@dataclass(frozen=True)
class _Waiting:
    """A kernel that is text yet.

    Attributes:
        assemble: Triton's function, of a text and of ``metadata``.
    """

    text: str
    metadata: Any
    options: str
    assemble: Callable[[str, Any], bytes]
    folder: Path

    def keep(self, code: bytes) -> None:
        """In the place of the nothing that Triton was given."""
        (path,) = self.folder.glob("*.cubin")
        path.write_bytes(code)


@dataclass
class AssembledTogether:
    """Kernels of which there will be machine code after ``finish``."""

    _waiting: list[_Waiting] = field(default_factory=list)

    def wait_for(self, stages: dict[str, Any], options: Any, folder: Path) -> None:
        """Changes the stages of a kernel for an NVIDIA GPU: its last one is left for ``finish``.

        Args:
            options: Triton's.
            folder: where the machine code goes.
        """
        assemble = stages.get("cubin")
        if assemble is None:
            return
        chosen = sorted((key, repr(value)) for key, value in vars(options).items() if key not in _IN_THE_TEXT)

        def wait(text: str, metadata: Any) -> bytes:
            self._waiting.append(_Waiting(text, metadata, repr(chosen), assemble, folder))
            return b""

        stages["cubin"] = wait

    def finish(self) -> Mapping[Path, Exception]:
        """Writes the machine code into the folders, and returns for which of them that failed."""
        failed: dict[Path, Exception] = {}
        for group in self._groups():
            if len(group) > 1 and _is_kept_joined(group):
                continue
            for kernel in group:
                try:
                    kernel.keep(kernel.assemble(kernel.text, kernel.metadata))
                except Exception as error:
                    failed[kernel.folder] = error
        return failed

    def _groups(self) -> list[list[_Waiting]]:
        """Kernels that can be in one text: of the same options, with different names, and with no variables, whose
        names are the same in each and whose places are written into the code."""
        groups: dict[tuple[str, int], list[_Waiting]] = {}
        of_a_name: dict[tuple[str, str], int] = {}
        alone = [kernel for kernel in self._waiting if _VARIABLE.search(without_unread(kernel.text))]
        for kernel in self._waiting:
            if kernel in alone:
                continue
            named = kernel.options, kernel.metadata["name"]
            of_a_name[named] = of_a_name.get(named, -1) + 1
            groups.setdefault((kernel.options, of_a_name[named]), []).append(kernel)
        return [*groups.values(), *([kernel] for kernel in alone)]


def _is_kept_joined(group: Sequence[_Waiting]) -> bool:
    """Writes the machine code of all, made at once; false if it cannot be made so."""
    first = group[0]
    try:
        code = first.assemble(joined([kernel.text for kernel in group]), first.metadata)
    except Exception:
        return False  # that of each tells which is at fault
    for kernel in group:
        kernel.keep(code)
    return True


def joined(texts: Sequence[str]) -> str:
    """Kernels in PTX as one text."""
    declared: set[str] = set()

    def once(found: re.Match[str]) -> str:
        is_new = found[0] not in declared
        declared.add(found[0])
        return found[0] if is_new else ""

    first, *others = map(without_unread, texts)
    return "\n".join(_DECLARATION.sub(once, text) for text in (first, *(_HEAD.sub("", o) for o in others)))


def without_unread(text: str) -> str:
    """A text without the variables that it only defines."""
    if not _VARIABLE.search(text):
        return text
    count = Counter(_NAME.findall(text))
    return _VARIABLE.sub(lambda found: found[0] if count[found[1]] > 1 else "", text)
