"""New values of inputs are stored where the old ones are, where that is safe: no copy, and no memory for both.

It is safe where one loop without reductions computes the new value, reads the old one at the same point or not at all,
and nothing behind it reads the old one. Nothing behind it may fail either, since a call that fails is made again as
plain Python: so no gathers, which check their indices, and no calls. Only kernels on the CPU do it: nobody knows when
a GPU is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_core.ir.loops import Load, LoopNest, LoopProgram, Step, Store
from compile_core.ir.schedule import Compute
from compile_core.ir.step_effects import reads, writes


def overwrite_inputs(program: LoopProgram, compute: Compute) -> LoopProgram:
    """The program that stores what ``compute.replaced`` allows into its inputs, and returns them as these results."""
    for result, given in compute.replaced.items():
        position, old = compute.outputs.index(result), program.inputs[compute.inputs.index(given)]
        new = _stored_whole(program, position, old)
        if new is not None and _is_safe(program.steps, new, old):
            program = _with_store(program, position, new, old)
    return program


def _stored_whole(program: LoopProgram, position: int, old: str) -> str | None:
    """The buffer of a result, if it is laid out as the input ``old`` and no other result lies in either."""
    view = program.outputs[position]
    if view is None or view.buffer in (*program.inputs, *program.destinations, *program.constants):
        return None
    spec, given = program.buffers[view.buffer], program.buffers[old]
    is_whole = view.offset == 0 and (tuple(view.shape), tuple(view.stride)) == (spec.shape, spec.stride)
    others = [other.buffer for other in program.outputs if other is not None]
    is_alone = others.count(view.buffer) == 1 and old not in others
    fits = spec == given and given.is_dense and given.device.type == "cpu"
    return view.buffer if is_whole and is_alone and fits else None


def _is_safe(steps: Sequence[Step], new: str, old: str) -> bool:
    writers = [number for number, step in enumerate(steps) if new in writes(step)]
    if len(writers) != 1 or any(old in writes(step) for step in steps):
        return False
    (number,) = writers
    nest = steps[number]
    if not isinstance(nest, LoopNest) or nest.reduced_axes or not all(map(_cannot_fail, steps[number:])):
        return False
    if any(old in reads(step) for step in steps[number + 1 :]):
        return False
    stores = [(n, s) for n, s in enumerate(nest.body) if isinstance(s, Store) and s.access.buffer == new]
    if len(stores) != 1 or stores[0][1].mask is not None:
        return False
    place, store = stores[0]
    loads = [(n, s.access) for n, s in enumerate(nest.body) if isinstance(s, Load) and s.access.buffer == old]
    return all(n < place and access == replace(store.access, buffer=old) for n, access in loads)


def _cannot_fail(step: Step) -> bool:
    return isinstance(step, LoopNest) and not any(
        isinstance(statement, Load | Store) and statement.access.gathers for statement in step.body
    )


def _with_store(program: LoopProgram, position: int, new: str, old: str) -> LoopProgram:
    outputs = list(program.outputs)
    view = outputs[position]
    assert view is not None
    outputs[position] = replace(view, buffer=old)
    return replace(
        program,
        steps=tuple(
            _renamed(step, new, old) if isinstance(step, LoopNest) else step for step in program.steps
        ),
        outputs=tuple(outputs),
        buffers={name: spec for name, spec in program.buffers.items() if name != new},
        overwritten=(*program.overwritten, old),
    )


def _renamed(nest: LoopNest, new: str, old: str) -> LoopNest:
    body = [
        replace(s, access=replace(s.access, buffer=old))
        if isinstance(s, Load | Store) and s.access.buffer == new
        else s
        for s in nest.body
    ]
    return replace(nest, body=tuple(body))
