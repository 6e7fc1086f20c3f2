"""Long programs in pieces, for passes that compare steps with one another: their time grows with the length alone.

A piece is some of the steps, one after the other, as a program of its own: it keeps what other pieces touch, so
whatever a pass makes of it may run in its place. Steps of different pieces are not joined, which costs a kernel or two
at each seam. No model's layer is as long as a piece, and most models' programs are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradsplit.compile_core.ir.loops import LoopProgram, Step, View
from gradsplit.compile_core.ir.step_effects import reads, writes

_MOST_STEPS = 1024


def in_pieces(program: LoopProgram, transform: Callable[[LoopProgram], LoopProgram]) -> LoopProgram:
    """What ``transform`` makes of the program, piece by piece."""
    if len(program.steps) <= _MOST_STEPS:
        return transform(program)
    starts = range(0, len(program.steps), _MOST_STEPS)
    parts = [program.steps[start : start + _MOST_STEPS] for start in starts]
    touched = [set[str]().union(*(reads(step) | writes(step) for step in part)) for part in parts]
    seen, shared = set[str](), {view.buffer for view in program.outputs if view is not None}
    for names in touched:
        shared |= seen & names
        seen |= names
    changed = [transform(_piece(program, *piece, shared)) for piece in zip(parts, touched, strict=True)]
    made = {name: spec for piece in changed for name, spec in piece.buffers.items()}
    kept = {*shared, *program.inputs, *program.destinations, *made}
    buffers = {name: spec for name, spec in program.buffers.items() if name in kept} | made
    return replace(
        program,
        buffers=buffers,
        constants={name: tensor for name, tensor in program.constants.items() if name in made},
        steps=tuple(step for piece in changed for step in piece.steps),
    )


def _piece(program: LoopProgram, steps: tuple[Step, ...], touched: set[str], shared: set[str]) -> LoopProgram:
    buffers = {name: program.buffers[name] for name in sorted(touched)}
    return replace(
        program,
        inputs=tuple(name for name in program.inputs if name in touched),
        destinations=tuple(name for name in program.destinations if name in touched),
        buffers=buffers,
        constants={name: program.constants[name] for name in buffers if name in program.constants},
        steps=steps,
        outputs=tuple(
            View(name, spec.shape, spec.stride) for name, spec in buffers.items() if name in shared
        ),
    )
