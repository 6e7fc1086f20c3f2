"""Memory that is given to a program for what it computes on the way.

Whoever records programs as CUDA graphs has one memory for the temporaries of them all (``runtime/shared_memory``). What
a program returns lies elsewhere: it is read until nobody holds it, whatever is replayed meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from gradsplit.compile_core.ir.communicator import Program


class TemporaryMemory(Protocol):
    """Where allocations of the current GPU by this thread lie from ``enter`` to ``leave``."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def make_room(self, size: int) -> None:
        """So many bytes are free in one piece from now on, between two programs."""
        ...

    def apart(self, program: str) -> Collection[str]:
        """Temporaries of the program of this name that lie with its results nevertheless."""
        ...


@runtime_checkable
class SharingProgram(Protocol):
    """A program that knows which of its allocations are temporaries."""

    def __call__(self, inputs: list[Any], /) -> Sequence[Any]: ...

    def sharing(self, memory: TemporaryMemory) -> Program:
        """The same program, which allocates its temporaries in ``memory``. What it raises may leave that entered."""
        ...


def sharing(program: Program, memory: TemporaryMemory) -> Program:
    """The program with its temporaries in ``memory``; one that does not know them allocates as it always does."""
    return program.sharing(memory) if isinstance(program, SharingProgram) else program
