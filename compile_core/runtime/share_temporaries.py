"""Which allocations of a region lie in memory that it shares with other programs: see ``runtime/shared_memory``.

Temporaries do: buffers that are not returned, and what torch's kernels allocate for themselves. A call that makes a
result allocates all of it in the region's own memory; what that call needs besides may be used again there. So does an
operator that is not torch's own, which may keep what it allocates, such as a table that it computes once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
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


def share_temporaries(instructions: Instructions, apart: Collection[str] = ()) -> Instructions:
    """The same instructions with a ``Switch`` wherever memory changes; the first and the last allocate own memory.

    Args:
        apart: temporaries that are to lie in own memory.
    """
    own = in_own_memory(instructions, apart)
    return replace(instructions, steps=tuple(_switched(instructions, own)))


def in_own_memory(instructions: Instructions, apart: Collection[str] = ()) -> set[str]:
    """The buffers that are returned or ``apart``, or may have memory in common with one that is."""
    program, places = instructions.program, instructions.places
    own = {view.buffer for view in program.outputs if view is not None}.union(apart)
    own |= {places[name].buffer for name in own if name in places}
    for step in reversed(program.steps):
        if isinstance(step, ExternCall) and may_alias(step.target) and not own.isdisjoint(step.outputs):
            own |= reads(step)
    return own


def _switched(instructions: Instructions, own: set[str]) -> Iterator[Instruction]:
    is_shared = False
    for step in instructions.steps:
        wanted = is_shared
        match step:
            case Allocate(buffer, taken):
                wanted = buffer not in own
                if not wanted:  # it must not lie in a temporary's memory
                    step = Allocate(buffer, tuple(n for n in taken if n in own or n in instructions.given))
            case Call(call):
                wanted = makes_temporaries(call, own)
        if wanted != is_shared:
            yield Switch(wanted)
            is_shared = wanted
        yield step
    if is_shared:
        yield Switch(False)


def makes_temporaries(call: ExternCall, own: Set[str]) -> bool:
    """Whether all that a call allocates is shared, given what lies in own memory."""
    return own.isdisjoint(call.outputs) and _is_torchs_own(call)


def _is_torchs_own(call: ExternCall) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target.namespace in ("aten", "prims")
