"""Which allocations of a region lie in memory that it shares with other programs: see ``runtime/shared_memory``.

Temporaries do: buffers that are not returned, and what torch's kernels allocate for themselves. A call that makes a
result allocates all of it in the region's own memory; what that call needs besides may be used again there. So does an
operator that is not torch's own, which may keep what it allocates, such as a table that it computes once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.ir.step_effects import reads
from gradsplit.compile_core.runtime.instructions import (
    Allocate,
    Call,
    Instruction,
    Instructions,
    Switch,
    may_alias,
)


def share_temporaries(instructions: Instructions) -> Instructions:
    """The same instructions with a ``Switch`` wherever memory changes; the first and the last allocate own memory."""
    own = _in_own_memory(instructions)
    return replace(instructions, steps=tuple(_switched(instructions.steps, own)))


def _in_own_memory(instructions: Instructions) -> set[str]:
    """The buffers that are returned or may have memory in common with one that is."""
    program, places = instructions.program, instructions.places
    own = {view.buffer for view in program.outputs if view is not None}
    own |= {places[name].buffer for name in own if name in places}
    for step in reversed(program.steps):
        if isinstance(step, ExternCall) and may_alias(step.target) and not own.isdisjoint(step.outputs):
            own |= reads(step)
    return own


def _switched(steps: Sequence[Instruction], own: set[str]) -> Iterator[Instruction]:
    is_shared = False
    for step in steps:
        wanted = is_shared
        match step:
            case Allocate(buffer, taken):
                wanted = buffer not in own
                if taken and not wanted:
                    step = Allocate(buffer)  # else it would lie in a temporary's memory
            case Call(call):
                wanted = own.isdisjoint(call.outputs) and _is_torchs_own(call)
        if wanted != is_shared:
            yield Switch(wanted)
            is_shared = wanted
        yield step
    if is_shared:
        yield Switch(False)


def _is_torchs_own(call: ExternCall) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target.namespace in ("aten", "prims")
