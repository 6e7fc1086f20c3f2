"""Joins a loop program with its kernels: writes the Python function that allocates, calls and frees.

The function is straight-line code without a decision in it. It is generated because an interpreter of steps
would cost more than many of the kernels that it calls; its text is also the readable summary of a compiled
region.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_core.errors import InternalError
from compile_core.ir.kernels import KernelSource
from compile_core.ir.loops import ExternCall, GeneratedStep, LoopProgram, View
from compile_core.ir.step_effects import reads, writes
from compile_core.ir.tensor_spec import TensorSpec

Kernel = Callable[..., None]


@dataclass(frozen=True)
class LinkedProgram:
    """A region that runs; see ``Region`` in ``runtime.executable``.

    Attributes:
        text: the generated function.
        sources: the kernels that it calls.
    """

    text: str
    sources: tuple[KernelSource, ...]
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

    def __call__(self, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(arguments)


def link_program(
    program: LoopProgram, sources: Sequence[KernelSource], kernels: Mapping[str, Kernel]
) -> LinkedProgram:
    """The region of a lowered program.

    Args:
        program: the steps in order.
        sources: one for each nest of the program.
        kernels: the built kernel of each source, by the nest's name; takes the tensors of
            ``KernelSource.buffers``.
    """
    writer = _Writer(program, {source.name: source for source in sources}, kernels)
    text = writer.write()
    filename = f"<gradsplit {program.name} {id(writer):x}>"
    # Tracebacks through generated code show its lines.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), writer.names)
    return LinkedProgram(text, tuple(sources), writer.names["run"])


@dataclass
class _Writer:
    program: LoopProgram
    sources: Mapping[str, KernelSource]
    kernels: Mapping[str, Kernel]
    names: dict[str, Any] = field(
        default_factory=lambda: {
            "empty_strided": torch.empty_strided,
            "as_strided": torch.as_strided,
            "torch": torch,
        }
    )
    lines: list[str] = field(default_factory=list)

    def write(self) -> str:
        program = self.program
        variables = {name: f"b{k}" for k, name in enumerate(program.buffers)}
        given = (*program.inputs, *program.destinations)
        allocated = set(given)
        self.names.update({variables[name]: tensor for name, tensor in program.constants.items()})
        allocated |= set(program.constants)
        self.variables = variables
        # Offsets of views count from where the buffer begins in its storage; at the start if it is allocated
        # here.
        self.allocated_here: set[str] = set()
        if given:
            self.lines.append(f"{''.join(variables[name] + ', ' for name in given)}= arguments")
            self.lines.append("arguments.clear()")
        freed_after = _freed_after(program)
        for position, step in enumerate(program.steps):
            if not isinstance(step, ExternCall):
                # What is read and was not written has no elements.
                self._allocate(sorted(reads(step) | writes(step)), allocated)
                self._call_kernel(step)
            else:
                results = {name for name in step.outputs if name is not None}
                self._allocate(sorted((reads(step) | writes(step)) - results), allocated)
                self._call_extern(step)
                allocated |= results
            freed = [variables[name] for name in freed_after[position]]
            if freed:
                self.lines.append(f"del {', '.join(freed)}")
        self._allocate([view.buffer for view in program.outputs if view is not None], allocated)
        outputs = "".join(f"{'None' if view is None else self._view(view)}, " for view in program.outputs)
        self.lines.append(f"return ({outputs})")
        head = [f"# {program.name}", "def run(arguments):"]
        return "\n".join([*head, *(f"    {line}" for line in self.lines)]) + "\n"

    def _allocate(self, names: Sequence[str], allocated: set[str]) -> None:
        for name in names:
            if name not in allocated:
                allocated.add(name)
                self.allocated_here.add(name)
                spec = self.program.buffers[name]
                dtype, device = self._constant(spec.dtype), self._constant(spec.device)
                arguments = f"{spec.shape}, {spec.stride}, dtype={dtype}, device={device}"
                self.lines.append(f"{self.variables[name]} = empty_strided({arguments})")

    def _call_kernel(self, nest: GeneratedStep) -> None:
        source = self.sources.get(nest.name)
        if source is None:
            raise InternalError(f"{self.program.name}: no kernel for nest {nest.name}")
        name = f"kernel_{nest.name}"
        self.names[name] = self.kernels[nest.name]
        arguments = [self.variables[buffer] for buffer in source.buffers]
        for k, base in enumerate(source.bases):
            if base:
                arguments[k] += (
                    f".data_ptr() + {base * self.program.buffers[source.buffers[k]].dtype.itemsize}"
                )
        self.lines.append(f"{name}({', '.join(arguments)})")

    def _call_extern(self, call: ExternCall) -> None:
        # Without the Python function that an operator is at first.
        called = getattr(call.target, "_op", call.target)
        function = self._named(f"extern_{str(call.target).replace('.', '_').replace('::', '_')}", called)
        arguments = [self._argument(argument) for argument in call.arguments]
        arguments += [f"{name}={self._argument(value)}" for name, value in call.keywords.items()]
        arguments += [f"{name}={self._view(view)}" for name, view in call.out.items()]
        expression = f"{function}({', '.join(arguments)})"
        unused = all(name is None for name in call.outputs)
        if call.out or unused:
            self.lines.append(expression)
        elif len(call.outputs) == 1 and call.outputs[0] is not None and not _returns_tuple(call):
            self.lines.append(f"{self.variables[call.outputs[0]]} = {expression}")
        else:
            targets = ["_" if name is None else self.variables[name] for name in call.outputs]
            self.lines.append(f"{''.join(target + ', ' for target in targets)}= {expression}")

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
        variable = self.variables[view.buffer]
        spec = self.program.buffers[view.buffer]
        if view.offset == 0 and _same_layout(view, spec):
            return variable
        offset = str(view.offset)
        if view.buffer not in self.allocated_here:
            start = f"{variable}.storage_offset()"
            offset = f"{start} + {view.offset}" if view.offset else start
        return f"as_strided({variable}, {tuple(view.shape)}, {tuple(view.stride)}, {offset})"


def _same_layout(view: View, spec: TensorSpec) -> bool:
    return tuple(view.shape) == spec.shape and tuple(view.stride) == spec.stride


def _returns_tuple(call: ExternCall) -> bool:
    returns = call.target._schema.returns
    return len(returns) != 1 or returns[0].type.kind() == "ListType"


def _freed_after(program: LoopProgram) -> list[list[str]]:
    """For each step, the inputs and temporaries that nothing reads or writes after it."""
    kept = set(program.constants)
    kept |= {view.buffer for view in program.outputs if view is not None}
    last: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        last.update(dict.fromkeys(reads(step) | writes(step), position))
    freed: list[list[str]] = [[] for _ in program.steps]
    for name, position in last.items():
        if name not in kept:
            freed[position].append(name)
    return freed
