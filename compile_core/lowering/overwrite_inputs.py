"""New values of inputs are stored where the old ones are, where that is safe: no copy, and no memory for both.

It is safe where one loop without reductions computes the new value, reads the old one at the same point or not at all,
and nothing behind it reads the old one. Nothing behind it may fail either, since a call that fails is made again as
plain Python: so no gathers, which check their indices, and no calls; all memory is allocated before.

On a GPU, stores happen in the order of the stream, as a copy would. There the loop must have a single axis: of a tile
with two sides several threads may load the same element, one of them when another has stored the new value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from compile_core.ir.loops import BandNest, Load, LoopNest, LoopProgram, Step, Store, View
from compile_core.ir.schedule import Compute
from compile_core.ir.step_effects import reads, writes
from compile_core.lowering.tiling_axes import simplify


def overwrite_inputs(program: LoopProgram, compute: Compute) -> LoopProgram:
    """The program that stores what ``compute.replaced`` allows into its inputs, and returns them as these results."""
    if not compute.replaced:
        return program
    results = {name: position for position, name in enumerate(compute.outputs)}
    inputs = dict(zip(compute.inputs, program.inputs, strict=True))
    returned = Counter(view.buffer for view in program.outputs if view is not None)
    uses = _Uses(program)
    stored: dict[str, str] = {}
    for result, given in compute.replaced.items():
        view, old = program.outputs[results[result]], inputs[given]
        if view is None or returned[view.buffer] != 1 or returned[old] or not _fits(program, view, old):
            continue
        if uses.may_store(view.buffer, old):
            stored[view.buffer] = old
    return _with_stores(program, stored) if stored else program


def _fits(program: LoopProgram, view: View, old: str) -> bool:
    """Whether a result is all of a buffer that is laid out as the input ``old``."""
    if view.buffer in (*program.destinations, *program.constants):
        return False
    spec, given = program.buffers[view.buffer], program.buffers[old]
    is_whole = view.offset == 0 and (tuple(view.shape), tuple(view.stride)) == (spec.shape, spec.stride)
    return is_whole and spec == given and given.is_dense and given.device.type in ("cpu", "cuda")


class _Uses:
    """Which steps write and read each buffer, and from where on no step can fail."""

    def __init__(self, program: LoopProgram) -> None:
        self.buffers = program.buffers
        self.steps = steps = program.steps
        self.writers: dict[str, list[int]] = {}
        self.last_reader: dict[str, int] = {}
        for number, step in enumerate(steps):
            for name in writes(step):
                self.writers.setdefault(name, []).append(number)
            self.last_reader.update(dict.fromkeys(reads(step), number))
        self.safe_from = len(steps)
        while self.safe_from and cannot_fail(steps[self.safe_from - 1]):
            self.safe_from -= 1

    def may_store(self, new: str, old: str) -> bool:
        """Whether the value of ``new`` may be computed into the memory of ``old``."""
        if len(self.writers.get(new, ())) != 1 or old in self.writers:
            return False
        (number,) = self.writers[new]
        nest = self.steps[number]
        if not isinstance(nest, LoopNest) or nest.reduced_axes or number < self.safe_from:
            return False
        if self.last_reader.get(old, number) > number:
            return False
        if self.buffers[old].device.type == "cuda" and len(simplify(nest).extents) > 1:
            return False
        stores = [(n, s) for n, s in enumerate(nest.body) if isinstance(s, Store) and s.access.buffer == new]
        if len(stores) != 1 or stores[0][1].mask is not None:
            return False
        place, store = stores[0]
        loads = [
            (n, s.access) for n, s in enumerate(nest.body) if isinstance(s, Load) and s.access.buffer == old
        ]
        return all(n < place and access == replace(store.access, buffer=old) for n, access in loads)


def cannot_fail(step: Step) -> bool:
    """Whether a step runs to its end once its memory is there."""
    return isinstance(step, LoopNest) and not any(
        isinstance(statement, Load | Store) and statement.access.gathers for statement in step.body
    )


def _with_stores(program: LoopProgram, stored: Mapping[str, str]) -> LoopProgram:
    return replace(
        program,
        steps=tuple(_with_names(step, stored) for step in program.steps),
        outputs=tuple(
            view if view is None else replace(view, buffer=stored.get(view.buffer, view.buffer))
            for view in program.outputs
        ),
        buffers={name: spec for name, spec in program.buffers.items() if name not in stored},
        overwritten=tuple(stored.values()),
    )


def _with_names(step: Step, stored: Mapping[str, str]) -> Step:
    if isinstance(step, BandNest):
        return replace(step, rows=_renamed(step.rows, stored))
    return _renamed(step, stored) if isinstance(step, LoopNest) else step


def _renamed(nest: LoopNest, stored: Mapping[str, str]) -> LoopNest:
    body = [
        replace(s, access=replace(s.access, buffer=stored.get(s.access.buffer, s.access.buffer)))
        if isinstance(s, Load | Store)
        else s
        for s in nest.body
    ]
    return replace(nest, body=tuple(body))
