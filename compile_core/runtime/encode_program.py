"""Writes a region as a program of ``region_interpreter.cpp``.

Registers hold the region's buffers, those that the caller gives first, and what a call needs besides. An operand that
is not negative is a register, a negative one the constant of index ``~operand``. The words of the instructions:

    CONSTANT register, constant
    ALLOCATE register, dtype, device type, device index, function, dimensions, sizes, strides
    VIEW     register, base, offset from where the base begins, dimensions, sizes, strides
    RUN      address of a C function of the buffers' addresses, function, count, a register and an offset in bytes each
    LAUNCH   kernel's handle, function, count, the grid's three sizes, threads, shared bytes, registers and offsets
    OPERATOR address, signature, words until the next instruction, and until the one after that, which follows if this
             succeeds, counts of arguments and of results, a word for each argument (of a list how many words after
             OPERATOR it stands), registers of results or -1, lists; see ``native_operators``
    CALL     function, names of keywords or -1, line, count of operands, count of results, operands, results
    PACK     register, whether a list (or a tuple), count, operands
    FREE     count, registers
    RETURN   count, operands
    TAKE     function, count, registers; the words of an ALLOCATE follow, which is left out if the function says of one
             of these tensors that nothing else has its memory

``function`` is the Python function that means the same. A view does not know its base, so that it costs a third of what
``as_strided`` does. Where several results lie in one buffer, ``as_strided`` makes them, so that a change of one is
noticed in the others.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from gradsplit.compile_core.ir.kernels import BuiltKernel, CudaLaunch, KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, GeneratedStep, View
from gradsplit.compile_core.ir.step_effects import views_in
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Call,
    Free,
    Instructions,
    Launch,
    Switch,
    function_of,
    is_whole,
    may_alias,
    returns_sequence,
)
from gradsplit.compile_core.runtime.native_operators import argument_names, native_call
from gradsplit.compile_core.toolchain.torch_library import device_codes, dtype_code
from gradsplit.compile_core.torch_facts.holders import is_held_once

Kernel = Callable[..., None]


class Opcode(IntEnum):
    """The first word of an instruction. C++ gets these numbers when it is built."""

    CONSTANT = 0
    ALLOCATE = 1
    VIEW = 2
    RUN = 3
    LAUNCH = 4
    OPERATOR = 5
    CALL = 6
    PACK = 7
    FREE = 8
    RETURN = 9
    TAKE = 10


@dataclass(frozen=True)
class EncodedProgram:
    """A program, the Python objects that it refers to, and the GPU that its kernels are launched on, if any."""

    words: bytes
    constants: tuple[Any, ...]
    device: torch.device | None


def encode_program(
    instructions: Instructions,
    sources: Mapping[str, KernelSource],
    kernels: Mapping[str, Kernel],
    first_line: int,
    memory: TemporaryMemory | None = None,
) -> EncodedProgram:
    """The program of a region.

    Args:
        sources, kernels, memory: see ``write_program``; a ``BuiltKernel`` runs without Python.
        first_line: the line of the first instruction in the text that tracebacks show.
    """
    encoder = _Encoder(instructions, sources, kernels, memory)
    encoder.encode(first_line)
    header = (encoder.count, len(instructions.given))
    return EncodedProgram(
        array("q", (*header, *encoder.words)).tobytes(), tuple(encoder.constants), encoder.device
    )


class _Encoder:
    def __init__(
        self,
        instructions: Instructions,
        sources: Mapping[str, KernelSource],
        kernels: Mapping[str, Kernel],
        memory: TemporaryMemory | None,
    ) -> None:
        self.words: list[int] = []
        self.constants: list[Any] = []
        self.device: torch.device | None = None
        self._instructions = instructions
        self._program = instructions.program
        self._sources = sources
        self._kernels = kernels
        self._memory = memory
        names = dict.fromkeys((*instructions.given, *instructions.buffers))
        self._registers = {name: k for k, name in enumerate(names)}
        self.count = len(self._registers)
        self._constant_places: dict[int, int] = {}

    def encode(self, first_line: int) -> None:
        for name, tensor in self._program.constants.items():
            self._emit(Opcode.CONSTANT, self._registers[name], self._constant(tensor))
        for line, instruction in enumerate(self._instructions.steps, first_line):
            match instruction:
                case Allocate(buffer, taken):
                    self._allocate(buffer, taken)
                case Launch(step):
                    self._launch(step, line)
                case Call(call):
                    self._call(call, line)
                case Free(buffers):
                    self._free([self._registers[name] for name in buffers])
                case Switch(is_shared):
                    assert self._memory is not None
                    function = self._memory.enter if is_shared else self._memory.leave
                    self._call_function(function, (), (), (), line)
        self._return(first_line + len(self._instructions.steps))

    def _emit(self, instruction: Opcode, *words: int) -> None:
        self.words += (instruction, *words)

    def _constant(self, value: Any) -> int:
        place = self._constant_places.setdefault(id(value), len(self.constants))
        if place == len(self.constants):
            self.constants.append(value)  # which keeps the identity its own
        return place

    def _new_register(self) -> int:
        self.count += 1
        return self.count - 1

    def _free(self, registers: Sequence[int]) -> None:
        if registers:
            self._emit(Opcode.FREE, len(registers), *registers)

    def _allocate(self, name: str, taken: Sequence[str]) -> None:
        spec = self._instructions.buffers[name]
        function = spec.empty
        register = self._registers[name]
        if spec.device.type == "cpu" or (spec.device.type == "cuda" and spec.device.index is not None):
            codes = (dtype_code(spec.dtype), *device_codes(spec.device), self._constant(function))
            if taken:
                registers = [self._registers[name] for name in taken]
                may_be_taken = self._constant(partial(is_held_once, elements=spec.numel))
                self._emit(Opcode.TAKE, may_be_taken, len(registers), *registers)
            self._emit(Opcode.ALLOCATE, register, *codes, len(spec.shape), *spec.shape, *spec.stride)
        else:
            self._call_function(function, (), (), (register,), 0)

    def _launch(self, step: GeneratedStep, line: int) -> None:
        source, kernel = self._sources[step.name], self._kernels[step.name]
        places = self._instructions.kernel_places(source)
        registers = [self._registers[place.buffer] for place in places]
        offsets = [place.offset_bytes for place in places]
        pairs = [word for pair in zip(registers, offsets, strict=True) for word in pair]
        if isinstance(kernel, BuiltKernel) and kernel.address and self._is_launched_here(kernel.launch):
            words = (kernel.address, self._constant(kernel.call), len(registers))
            name = self._constant(f"{self._program.name}.{step.name}".encode())
            if kernel.launch is None:
                self._emit(Opcode.RUN, *words, name, *pairs)
            else:
                launch = kernel.launch
                sizes = (*launch.grid, launch.threads, launch.shared_bytes)
                self._emit(Opcode.LAUNCH, *words, *sizes, name, *pairs)
            return
        function = kernel.call if isinstance(kernel, BuiltKernel) else kernel
        if any(offsets):
            function = partial(_call_with_offsets, function, offsets)
        self._call_function(function, registers, (), (), line)

    def _is_launched_here(self, launch: CudaLaunch | None) -> bool:
        """Whether it is on the one GPU whose stream the interpreter is given."""
        if launch is not None and self.device is None:
            self.device = launch.device
        return launch is None or launch.device == self.device

    def _call(self, call: ExternCall, line: int) -> None:
        temporary: list[int] = []
        view = (
            self._view if call.out or not may_alias(call.target) else partial(self._view_with_base, line=line)
        )
        keywords = {**call.keywords, **call.out}
        operands = [self._operand(value, view, temporary) for value in (*call.arguments, *keywords.values())]
        results: list[int] = []
        if not call.out and any(name is not None for name in call.outputs):
            results = [-1 if name is None else self._registers[name] for name in call.outputs]
            if len(results) > 1 or returns_sequence(call):
                results.append(-1)
        self._operator(call, dict(zip(argument_names(call), operands, strict=True)), results)
        self._call_function(function_of(call, self._program), operands, tuple(keywords), results, line)
        self._free(temporary)

    def _operator(self, call: ExternCall, operands: Mapping[str, int], results: Sequence[int]) -> None:
        """The operator in C, if there is one, which skips the call that follows."""
        (first, *_) = (*call.arguments, *call.keywords.values(), None)
        if not isinstance(first, View):
            return
        native = native_call(call, self._program.buffers[first.buffer].device.type)
        if native is None:
            return
        places = [] if call.out else [*results, *(-1 for _ in call.outputs)][: len(call.outputs)]
        # Lists stand after everything else; where, is counted from the instruction.
        own_words = 8 + len(native.arguments) + len(places)
        arguments: list[int] = []
        lists: list[int] = []
        for value in native.arguments:
            if isinstance(value, str):
                arguments.append(operands[value])
            elif isinstance(value, tuple):
                arguments.append(own_words + len(lists))
                lists += value
            else:
                arguments.append(value)
        own_words += len(lists)
        lengths = (own_words, own_words + 6 + len(operands) + len(results))
        counts = (len(arguments), len(places))
        name = self._constant(call.target.name().split(".")[0].encode())
        words = (native.address, native.signature, *lengths, *counts, name)
        self._emit(Opcode.OPERATOR, *words, *arguments, *places, *lists)

    def _call_function(
        self,
        function: Any,
        operands: Sequence[int],
        keywords: tuple[str, ...],
        results: Sequence[int],
        line: int,
    ) -> None:
        names = self._constant(keywords) if keywords else -1
        counts = (len(operands), len(results))
        self._emit(Opcode.CALL, self._constant(function), names, line, *counts, *operands, *results)

    def _operand(self, value: Any, make_view: Callable[[View], int], temporary: list[int]) -> int:
        """The operand for an argument; registers that are needed for it are noted."""
        if isinstance(value, View):
            if is_whole(value, self._program):
                return self._registers[value.buffer]
            temporary.append(make_view(value))
            return temporary[-1]
        if isinstance(value, (list, tuple)) and any(views_in(value)):
            items = [self._operand(item, make_view, temporary) for item in value]
            temporary.append(self._new_register())
            self._emit(Opcode.PACK, temporary[-1], isinstance(value, list), len(items), *items)
            return temporary[-1]
        return ~self._constant(value)

    def _view(self, view: View) -> int:
        register = self._new_register()
        spec = (*view.shape, *view.stride)
        base = self._registers[view.buffer]
        self._emit(Opcode.VIEW, register, base, view.offset, len(view.shape), *spec)
        return register

    def _view_with_base(self, view: View, line: int) -> int:
        """A view whose changes are noticed in its base."""
        register = self._new_register()
        self._call_function(
            partial(_as_strided, view=view), [self._registers[view.buffer]], (), [register], line
        )
        return register

    def _return(self, line: int) -> None:
        in_buffer = Counter(view.buffer for view in self._program.outputs if view is not None)
        operands = []
        for view in self._program.outputs:
            if view is None:
                operands.append(~self._constant(None))
            elif view.buffer in self._instructions.places:
                operands.append(self._view(self._instructions.in_owner(view)))
            elif is_whole(view, self._program):
                operands.append(self._registers[view.buffer])
            elif in_buffer[view.buffer] == 1 and view.buffer in self._instructions.allocated:
                operands.append(self._view(view))
            else:
                operands.append(self._view_with_base(view, line))
        self._emit(Opcode.RETURN, len(operands), *operands)


def _as_strided(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(tensor, view.shape, view.stride, tensor.storage_offset() + view.offset)


def _call_with_offsets(function: Kernel, offsets: Sequence[int], *tensors: torch.Tensor) -> None:
    function(*(tensor.data_ptr() + offset for tensor, offset in zip(tensors, offsets, strict=True)))
