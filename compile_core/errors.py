"""The errors of the compiler.

Users meet three kinds. ``ValueError`` and ``TypeError`` mean a wrong argument of a public function. The
``CompileError`` family means that a program could not be compiled: it says what happened, where in the user's code,
and what to do next. ``InternalError`` means that one of our own invariants broke: a bug in gradsplit.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CodeLocation:
    """A line of the user's code, as an error or a graph node points to it."""

    filename: str
    line: int
    function: str
    text: str = ""

    @staticmethod
    def of(code: types.CodeType, line: int) -> CodeLocation:
        """A line of a function's code, with its text where the file is there."""
        text = linecache.getline(code.co_filename, line).strip()
        return CodeLocation(code.co_filename, line, code.co_name, text)

    def __str__(self) -> str:
        shown = f'File "{self.filename}", line {self.line}, in {self.function}'
        return f"{shown}\n    {self.text}" if self.text else shown


class CompileError(Exception):
    """A program that cannot be compiled as requested."""


# Of a deep chain of calls, messages show the first and the last.
_SHOWN_CALLS = 12


class Unsupported(CompileError):
    """Something in the user's program that a stage has no rule for.

    Under ``fullgraph=True`` it reaches the user; else the stage's caller logs it and runs plain Python or torch's own
    kernels instead, which is always correct.

    Args:
        reason_id: stable kebab-case name of the reason, e.g. ``"data-dependent-branch"``.
        explanation: one sentence: what happened.
        hint: one sentence: what the user can do.
        location: the user's line, if known.
        stack: the lines of all calls that lead there, outermost first; just ``location`` by default.
    """

    def __init__(
        self,
        reason_id: str,
        explanation: str,
        hint: str = "",
        location: CodeLocation | None = None,
        stack: Sequence[CodeLocation] = (),
    ) -> None:
        self.reason_id = reason_id
        self.explanation = explanation
        self.hint = hint
        self.location = location
        self.stack = tuple(stack) or (() if location is None else (location,))
        super().__init__(str(self))

    def without_frames(self) -> Unsupported:
        """The error as it may be kept: the frames of its traceback hold the tensors of the call that failed."""
        errors: list[BaseException] = [self]
        while errors:
            error = errors.pop()
            if error.__traceback__ is not None:
                error.__traceback__ = None
                errors += [other for other in (error.__cause__, error.__context__) if other is not None]
        return self

    def __str__(self) -> str:
        lines = [f"[{self.reason_id}] {self.explanation}"]
        shown = [f"  {place}" for place in self.stack]
        if len(shown) > _SHOWN_CALLS:
            half = _SHOWN_CALLS // 2
            shown[half:-half] = [f"  ... {len(shown) - 2 * half} more calls ..."]
        lines += shown
        if self.hint:
            lines.append(f"Hint: {self.hint}")
        return "\n".join(lines)


class InternalError(CompileError):
    """A broken invariant of the compiler itself; please report it with the message."""
