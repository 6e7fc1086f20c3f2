"""What libraries allocate for themselves while torch's operators run, seen in a plain run of a program.

A convolution may need tens of MiB on the way. When it is done, torch's allocator has got back so many bytes of those
that it gave out meanwhile: several pieces count together, as if all were needed at once, and what a library keeps, as
cuBLAS does its workspace, does not count. Small pieces do not either; the allocator has memory of its own for them.
The gradients of a convolution are made one after the other, so here each is made by a call of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.runtime.instructions import Call, Instruction, Instructions, Switch

# Where ``convolution_backward`` takes which gradients it is to make.
_MASK = 10


@dataclass(frozen=True)
class CallMeter:
    """Stands where a memory for temporaries does; see ``TemporaryMemory``. What is entered and left is a call.

    Attributes:
        taken: bytes, for the parts of the calls of each program in order.
        program: whose calls they are.
    """

    taken: dict[str, list[int]] = field(default_factory=dict)
    program: str = ""
    _before: list[tuple[int, int]] = field(default_factory=list)

    def of(self, program: str) -> CallMeter:
        self.taken[program] = []
        return CallMeter(self.taken, program)

    def enter(self) -> None:
        self._before.append(_given_and_got_back())

    def leave(self) -> None:
        before = self._before.pop()
        self.taken[self.program].append(
            min(now - then for now, then in zip(_given_and_got_back(), before, strict=True))
        )

    def make_room(self, size: int) -> None: ...

    def apart(self, program: str) -> Collection[str]:
        return ()


def meter_calls(instructions: Instructions) -> Instructions:
    """What computes the same, with each part of a call that allocates entered and left."""
    return replace(instructions, steps=tuple(_metered(instructions)))


def parts(call: ExternCall) -> list[ExternCall]:
    """The gradients of a convolution as calls that make one each; any other call as it is."""
    if call.target is not torch.ops.aten.convolution_backward.default or len(call.arguments) <= _MASK:
        return [call]
    mask = call.arguments[_MASK]
    found = []
    for k, name in enumerate(call.outputs):
        if name is not None and mask[k]:
            only = [other == k for other in range(len(mask))]
            given = (*call.arguments[:_MASK], only, *call.arguments[_MASK + 1 :])
            made = tuple(name if made else None for made in only)
            found.append(replace(call, arguments=given, outputs=made))
    return found or [call]


def may_be_metered() -> bool:
    """Whether torch's own allocator counts, and a first run is like others: not where cuDNN tries all that it has."""
    return (
        torch.cuda.is_initialized()
        and torch.cuda.get_allocator_backend() == "native"
        and not torch.backends.cudnn.benchmark
    )


def _metered(instructions: Instructions) -> Iterator[Instruction]:
    for step in instructions.steps:
        if isinstance(step, Call) and not step.call.out:
            for part in parts(step.call):
                yield from (Switch(True), Call(part), Switch(False))
        else:
            yield step


def _given_and_got_back() -> tuple[int, int]:
    """Bytes of large pieces that the allocator of the current GPU ever did."""
    counts = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["large_pool"]
    return counts["allocated"], counts["freed"]
