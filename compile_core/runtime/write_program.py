"""Writes a region as a Python function: straight-line code without a decision in it.

It is the readable summary of a compiled region, which tracebacks show, and what runs where there is no interpreter of
regions.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, GeneratedStep, View
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Call,
    Free,
    Instruction,
    Instructions,
    Launch,
    Switch,
    function_of,
    is_whole,
    returns_sequence,
)


@dataclass(frozen=True)
class PythonProgram:
    """The function's text.

    Attributes:
        filename: what tracebacks call it.
        first_line: the number of the line of the first instruction.
        names: what the text refers to.
    """

    text: str
    filename: str
    first_line: int
    names: dict[str, Any]

    def function(self) -> Callable[[list[torch.Tensor]], tuple[Any, ...]]:
        """The function; its list of inputs and destinations is emptied."""
        exec(compile(self.text, self.filename, "exec"), self.names)
        return self.names["run"]


def write_program(
    instructions: Instructions,
    sources: Mapping[str, KernelSource],
    kernels: Mapping[str, Callable[..., None]],
    memory: TemporaryMemory | None = None,
) -> PythonProgram:
    """The text of a region.

    Args:
        sources: those of the program's kernels, by the nest's name.
        kernels: functions of the tensors of ``KernelSource.buffers``, or of their addresses.
        memory: what each ``Switch`` is about.
    """
    writer = _Writer(instructions, sources, kernels, memory)
    head, lines = writer.head(), writer.lines()
    text = "\n".join([*head, *lines]) + "\n"
    filename = f"<gradsplit {instructions.program.name} {id(writer):x}>"
    # Tracebacks through generated code show its lines.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    return PythonProgram(text, filename, len(head) + 1, writer.names)


@dataclass
class _Writer:
    instructions: Instructions
    sources: Mapping[str, KernelSource]
    kernels: Mapping[str, Callable[..., None]]
    memory: TemporaryMemory | None
    names: dict[str, Any] = field(
        default_factory=lambda: {
            "empty_strided": torch.empty_strided,
            "as_strided": torch.as_strided,
            "torch": torch,
        }
    )

    def __post_init__(self) -> None:
        program = self.instructions.program
        self.program = program
        numbered = {name: f"b{k}" for k, name in enumerate(program.buffers)}
        self.variables = {name: numbered.get(name, name) for name in self.instructions.buffers}
        self.names.update({self.variables[name]: tensor for name, tensor in program.constants.items()})

    def head(self) -> list[str]:
        head = [f"# {self.program.name}", "def run(arguments):"]
        if self.instructions.given:
            given = "".join(f"{self.variables[name]}, " for name in self.instructions.given)
            head += [f"    {given}= arguments", "    arguments.clear()"]
        return head

    def lines(self) -> list[str]:
        lines = [self._line(instruction) for instruction in self.instructions.steps]
        outputs = [f"{'None' if view is None else self._view(view)}, " for view in self.program.outputs]
        return [f"    {line}" for line in (*lines, f"return ({''.join(outputs)})")]

    def _line(self, instruction: Instruction) -> str:
        match instruction:
            case Allocate(buffer, taken):
                return self._allocation(buffer, taken)
            case Launch(step):
                return self._launch(step)
            case Call(call):
                return self._call(call)
            case Free(buffers):
                return f"del {', '.join(self.variables[name] for name in buffers)}"
            case Switch(is_shared):
                return f"{self._named('memory', self.memory)}.{'enter' if is_shared else 'leave'}()"

    def _allocation(self, name: str, taken: Sequence[str]) -> str:
        spec = self.instructions.buffers[name]
        dtype, device = self._constant(spec.dtype), self._constant(spec.device)
        arguments = f"{spec.shape}, {spec.stride}, dtype={dtype}, device={device}"
        # Only the interpreter takes memory over.
        note = f"  # or the memory of {' or '.join(self.variables[name] for name in taken)}" if taken else ""
        return f"{self.variables[name]} = empty_strided({arguments}){note}"

    def _launch(self, step: GeneratedStep) -> str:
        source = self.sources[step.name]
        name = f"kernel_{step.name}"
        self.names[name] = self.kernels[step.name]
        places = self.instructions.kernel_places(source)
        arguments = [
            f"{self.variables[place.buffer]}.data_ptr() + {place.offset_bytes}"
            if place.offset_bytes
            else self.variables[place.buffer]
            for place in places
        ]
        return f"{name}({', '.join(arguments)})"

    def _call(self, call: ExternCall) -> str:
        name = f"extern_{str(call.target).replace('.', '_').replace('::', '_')}"
        function = self._named(name, function_of(call, self.program))
        arguments = [self._argument(argument) for argument in call.arguments]
        arguments += [f"{name}={self._argument(value)}" for name, value in call.keywords.items()]
        arguments += [f"{name}={self._view(view)}" for name, view in call.out.items()]
        expression = f"{function}({', '.join(arguments)})"
        unused = all(name is None for name in call.outputs)
        if call.out or unused:
            return expression
        if len(call.outputs) == 1 and call.outputs[0] is not None and not returns_sequence(call):
            return f"{self.variables[call.outputs[0]]} = {expression}"
        targets = ["_" if name is None else self.variables[name] for name in call.outputs]
        return f"{''.join(target + ', ' for target in targets)}= {expression}"

    def _argument(self, value: Any) -> str:
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._argument(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        finite = isinstance(value, float) and math.isfinite(value)
        if value is None or finite or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """A name for a value that has no literal, such as a dtype or an infinity."""
        readable = "".join(letter if letter.isalnum() else "_" for letter in str(value))
        return self._named(f"constant_{readable}", value)

    def _named(self, wanted: str, value: Any) -> str:
        """``wanted`` as the name of a value, or the next like it that stands for nothing else."""
        name = wanted
        count = 0
        while self.names.setdefault(name, value) is not value and self.names[name] != value:
            count += 1
            name = f"{wanted}_{count}"
        return name

    def _view(self, view: View) -> str:
        view = self.instructions.in_owner(view)
        variable = self.variables[view.buffer]
        if is_whole(view, self.program):
            return variable
        offset = str(view.offset)
        if view.buffer not in self.instructions.allocated:
            # Offsets of views count from where the buffer begins in its storage.
            start = f"{variable}.storage_offset()"
            offset = f"{start} + {view.offset}" if view.offset else start
        return f"as_strided({variable}, {tuple(view.shape)}, {tuple(view.stride)}, {offset})"
