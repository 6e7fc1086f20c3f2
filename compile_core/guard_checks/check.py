"""The check of a frame's guards.

It is one straight program, run by the interpreter in C where there is a compiler, else as generated Python. Each
source is evaluated once, at its first use, and a failed condition ends it with the number of its guard; success returns
the list of the graph's input tensors, which the check passed on its way. A guard's condition is a Python expression;
its kind says which instruction of the interpreter means the same, with the guard's constants as operands.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.guard_checks.guard_interpreter import guard_interpreter
from gradsplit.compile_core.guard_checks.guard_program import compile_program
from gradsplit.compile_core.ir.captured import CapturedFrame, Guard
from gradsplit.compile_core.ir.source_writer import SourceWriter, compile_function
from gradsplit.compile_core.ir.sources import variable_of
from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def compile_check(frame: CapturedFrame) -> Callable[..., Any]:
    """The guard check of a frame: called with the frame's arguments, it returns the list of input tensors,
    or the index of the guard that failed, or -1 where following a source raised."""
    interpreter = guard_interpreter()
    check = None if interpreter is None else compile_program(frame, interpreter)
    return compile_python_check(frame) if check is None else check


def compile_python_check(frame: CapturedFrame) -> Callable[..., Any]:
    """The check as generated Python."""
    writer = _CheckWriter()
    for index, guard in enumerate(frame.guards):
        names = [writer.read(source) for source in guard.sources]
        writer.lines.append(f"if not ({writer.condition(guard, names)}): return {index}")
    inputs = [] if frame.graph is None else [writer.read(entry.source) for entry in frame.graph.inputs]
    writer.lines.append(f"return [{', '.join(inputs)}]")
    arguments = ", ".join(map(variable_of, frame.arguments))
    body = "\n".join(f"        {line}" for line in writer.lines)
    text = f"def check({arguments}):\n    try:\n{body}\n    except MemoryError:\n        raise\n"
    text += "    except Exception:\n        return -1\n"
    return compile_function(text, "check", writer.constants)


def explain_failure(frame: CapturedFrame, arguments: Sequence[Any]) -> str:
    """The text of the first guard that does not hold for these arguments (slow: one evaluation per guard)."""
    names = ", ".join(map(variable_of, frame.arguments))
    for guard in frame.guards:
        writer = _CheckWriter()
        try:
            read = [writer.read(source) for source in guard.sources]
            writer.lines.append(f"return bool({writer.condition(guard, read)})")
            body = "\n".join(f"    {line}" for line in writer.lines)
            holds = compile_function(f"def check({names}):\n{body}\n", "check", writer.constants)(*arguments)
        except Exception as error:
            return f"{guard.text}: no longer readable ({type(error).__name__}: {error})"
        if not holds:
            return f"not: {guard.text}"
    return "every guard holds"


def values_read(frame: CapturedFrame, guard: Guard, arguments: Sequence[Any]) -> str:
    """What a guard is about has these values now, in words."""
    writer = _CheckWriter()
    read = "".join(f"{writer.read(source)}, " for source in guard.sources)
    body = "\n".join(f"    {line}" for line in (*writer.lines, f"return ({read})"))
    names = ", ".join(map(variable_of, frame.arguments))
    values = compile_function(f"def read({names}):\n{body}\n", "read", writer.constants)(*arguments)
    return ", ".join(
        f"{source} is {TensorSpec.of(value) if isinstance(value, torch.Tensor) else reprlib.repr(value)}"
        for source, value in zip(guard.sources, values, strict=True)
    )


class _CheckWriter(SourceWriter):
    """Lines of the check."""

    def condition(self, guard: Guard, names: Sequence[str]) -> str:
        constants = {f"c{index}": self.constant(value) for index, value in enumerate(guard.constants)}
        # Global names cost a dictionary look-up per use, as cheap as a local that would have to be bound
        # first.
        return guard.condition.format(*names, **constants)
