"""What a region does, step by step: when each buffer is allocated and when it is freed.

From these instructions a program is made for the interpreter (``encode_program``), and the Python function that does
the same (``write_program``), one line an instruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from gradsplit.compile_core.ir.kept_calls import in_layout
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, GeneratedStep, LoopProgram, View
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime.place_buffers import BufferPlace, Placement, place_buffers
from gradsplit.compile_core.runtime.take_memory import memory_to_take

aten = torch.ops.aten

# Functions of torch that read their arguments in a fraction of the time that the operator's object takes.
_QUICK_FUNCTIONS = {
    aten.mm.out: torch.mm,
    aten.bmm.out: torch.bmm,
    aten.addmm.out: torch.addmm,
    aten.baddbmm.out: torch.baddbmm,
    aten.convolution.default: torch.convolution,
}


@dataclass(frozen=True)
class Allocate:
    """Makes a buffer; in the memory of one of ``taken``, which the next step is the last to read, if nobody else has
    that."""

    buffer: str
    taken: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """Runs the kernel of a nest."""

    step: GeneratedStep


@dataclass(frozen=True)
class Call:
    """Calls one of torch's operators."""

    call: ExternCall


@dataclass(frozen=True)
class Free:
    """Nothing reads these any more."""

    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Switch:
    """What is allocated from here on lies in memory that recordings share, or no more; see ``share_temporaries``."""

    is_shared: bool


Instruction = Allocate | Launch | Call | Free | Switch


@dataclass(frozen=True)
class Instructions:
    """A program's instructions in order.

    Attributes:
        given: buffers that the caller passes, in order.
        buffers: the program's, but for those that lie in another, and those others.
        places: where the former lie.
        allocated: those that an ``Allocate`` makes in new memory, where they begin where their storage does.
    """

    program: LoopProgram
    given: tuple[str, ...]
    steps: tuple[Instruction, ...]
    buffers: Mapping[str, TensorSpec]
    places: Mapping[str, BufferPlace]
    allocated: frozenset[str]

    def kernel_places(self, source: KernelSource) -> list[BufferPlace]:
        """What a kernel is given, in order."""
        found = []
        for name, base in zip(source.buffers, source.bases or (0,) * len(source.buffers), strict=True):
            place = self.places.get(name, BufferPlace(name, 0))
            base_bytes = base * self.program.buffers[name].dtype.itemsize
            found.append(BufferPlace(place.buffer, place.offset_bytes + base_bytes))
        return found

    def in_owner(self, view: View) -> View:
        """The same window as one of the buffer in whose memory its buffer lies, which has the same dtype."""
        place = self.places.get(view.buffer)
        if place is None:
            return view
        itemsize = self.program.buffers[view.buffer].dtype.itemsize
        return replace(view, buffer=place.buffer, offset=view.offset + place.offset_bytes // itemsize)


def instructions_of(program: LoopProgram, kernels_take_addresses: bool) -> Instructions:
    """A temporary is allocated before the first step that touches it and freed after the last one.

    What is touched after an input got its new value is allocated before: a call that fails for want of memory is made
    again, with the old values. Small temporaries share a buffer where kernels take addresses instead of tensors.
    """
    placement = place_buffers(program) if kernels_take_addresses else Placement({}, {})
    places = placement.places
    given = (*program.inputs, *program.destinations)
    known = {*given, *program.constants}
    steps: list[Instruction] = []

    def allocate(names: Sequence[str], taken: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> None:
        steps.extend(
            Allocate(name, taken.get(name, ())) for name in dict.fromkeys(names) if name not in known
        )
        known.update(names)

    all_touched = [{_owner(name, places) for name in reads(step) | writes(step)} for step in program.steps]
    overwritten = set(program.overwritten)
    returned = [_owner(view.buffer, places) for view in program.outputs if view is not None]
    freed_after = _freed_after(program, all_touched, returned)
    owners = placement.buffers
    for position, (step, touched) in enumerate(zip(program.steps, all_touched, strict=True)):
        # What is read and was not written has no elements.
        if isinstance(step, ExternCall):
            results = {name for name in step.outputs if name is not None}
            allocate(sorted(touched - results))
            steps.append(Call(step))
            known |= results
        else:
            if not overwritten.isdisjoint(writes(step)):
                touched = touched.union(returned, *all_touched[position:])
            made = sorted(touched - known)
            # What is overwritten is the caller's.
            free = [] if overwritten else [name for name in freed_after[position] if name not in owners]
            allocate(made, memory_to_take(step, [n for n in made if n not in owners], free, program.buffers))
            steps.append(Launch(step))
        if freed_after[position]:
            steps.append(Free(tuple(freed_after[position])))
    allocate(returned)
    allocated = frozenset(step.buffer for step in steps if isinstance(step, Allocate) and not step.taken)
    buffers = {name: spec for name, spec in program.buffers.items() if name not in places}
    return Instructions(program, given, tuple(steps), {**buffers, **placement.buffers}, places, allocated)


def _owner(name: str, places: Mapping[str, BufferPlace]) -> str:
    """The buffer in whose memory a buffer lies."""
    return places[name].buffer if name in places else name


def _freed_after(
    program: LoopProgram, all_touched: Sequence[set[str]], returned: Sequence[str]
) -> list[list[str]]:
    """For each step, the inputs and temporaries that nothing touches after it, given what each step touches."""
    kept = {*program.constants, *returned}
    last: dict[str, int] = {}
    for position, touched in enumerate(all_touched):
        last.update(dict.fromkeys(sorted(touched), position))
    freed: list[list[str]] = [[] for _ in program.steps]
    for name, position in last.items():
        if name not in kept:
            freed[position].append(name)
    return freed


def is_whole(view: View, program: LoopProgram) -> bool:
    """Whether a view is its buffer as it is."""
    spec = program.buffers.get(view.buffer)
    if spec is None:  # others lie in it
        return False
    return view.offset == 0 and (tuple(view.shape), tuple(view.stride)) == (spec.shape, spec.stride)


def function_of(call: ExternCall, program: LoopProgram) -> Any:
    """The Python function that calls an operator."""
    if call.target in _QUICK_FUNCTIONS:
        return _QUICK_FUNCTIONS[call.target]
    # An operator itself is a Python function at first.
    function = getattr(call.target, "_op", call.target)
    specs = tuple(None if name is None else program.buffers[name] for name in call.outputs)
    if call.out or may_alias(call.target) or not any(specs):
        return function
    return LaidOut(function, specs, returns_sequence(call))


@dataclass(frozen=True)
class LaidOut:
    """Calls an operator, and copies a result that lies otherwise than that of the trace.

    What torch, or a program of its own operator, says of fake tensors is now and then not what the kernel does: the
    angle of a transposed complex tensor is row-major.
    """

    function: Any
    specs: tuple[TensorSpec | None, ...]
    several: bool

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        results = self.function(*arguments, **keywords)
        if self.several:
            return [_laid_out(result, spec) for result, spec in zip(results, self.specs, strict=True)]
        return _laid_out(results, self.specs[0])


def _laid_out(result: Any, spec: TensorSpec | None) -> Any:
    if spec is None or result is None or result.stride() == spec.stride:
        return result
    # What only torch's kernels read, as the state of an attention's random numbers, may have sizes of its own.
    if tuple(result.shape) != spec.shape or TensorSpec.of(result).layout == spec.layout:
        return result
    return in_layout(result, spec)


def may_alias(target: Any) -> bool:
    """Whether an operator may return something in the memory of an argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in target._schema.returns)


def returns_sequence(call: ExternCall) -> bool:
    """Whether an operator returns several tensors, or a list of one."""
    returns = call.target._schema.returns
    return len(returns) != 1 or returns[0].type.kind() == "ListType"
