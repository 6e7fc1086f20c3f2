"""Joins a loop program with its kernels: the function that allocates, launches, calls and frees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.kernels import BuiltKernel, KernelSource
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.temporary_memory import TemporaryMemory
from gradsplit.compile_core.runtime.encode_program import encode_program
from gradsplit.compile_core.runtime.instructions import Instructions, Launch, instructions_of
from gradsplit.compile_core.runtime.meter_calls import CallMeter, meter_calls
from gradsplit.compile_core.runtime.region_interpreter import Run, region_interpreter
from gradsplit.compile_core.runtime.share_temporaries import share_temporaries
from gradsplit.compile_core.runtime.write_program import write_program


@dataclass(frozen=True)
class LinkedProgram:
    """A region that runs; see ``Region`` in ``runtime.executable``.

    Attributes:
        text: what it does, as Python.
        sources: the kernels that it calls.
        link_again: the same program with its temporaries in a memory that is given.
        instructions: what it allocates when.
    """

    text: str
    sources: tuple[KernelSource, ...]
    run: Run
    link_again: Callable[[TemporaryMemory], LinkedProgram] | None = None
    instructions: Callable[[], Instructions] | None = None

    def __call__(self, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(arguments)

    def sharing(self, memory: TemporaryMemory) -> LinkedProgram:
        """See ``SharingProgram``."""
        return self if self.link_again is None else self.link_again(memory)


def link_program(
    program: LoopProgram,
    sources: Sequence[KernelSource],
    kernels: Mapping[str, Callable[..., None]],
    memory: TemporaryMemory | None = None,
) -> LinkedProgram:
    """The region of a lowered program.

    Args:
        program: the steps in order.
        sources: one for each nest of the program.
        kernels: the built kernel of each source, by the nest's name; takes the tensors of
            ``KernelSource.buffers``, or their addresses.
        memory: where its temporaries lie; else, with what it returns, where torch's allocator puts them. Or what
            meters its calls.
    """
    built = all(isinstance(kernel, BuiltKernel) for kernel in kernels.values())
    instructions = instructions_of(program, kernels_take_addresses=built)
    if isinstance(memory, CallMeter):
        memory, instructions = memory.of(program.name), meter_calls(instructions)
    elif memory is not None:
        instructions = share_temporaries(instructions, memory.apart(program.name))
    by_name = {source.name: source for source in sources}
    for instruction in instructions.steps:
        if isinstance(instruction, Launch) and instruction.step.name not in by_name:
            raise InternalError(f"{program.name}: no kernel for nest {instruction.step.name}")
    text = write_program(instructions, by_name, kernels, memory)
    interpreter = region_interpreter()
    if interpreter is None:
        run = text.function()
    else:
        encoded = encode_program(instructions, by_name, kernels, text.first_line, memory)
        run = interpreter.bind(encoded, text.filename)
    return LinkedProgram(text.text, tuple(sources), run)
