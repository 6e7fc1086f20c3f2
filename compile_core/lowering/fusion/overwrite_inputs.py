"""New values of inputs are stored where the old ones are: by the loop that computes them where that is safe, which
takes no copy and no memory for both, else by copies at the end.

It is safe where one loop without reductions computes the new value, reads the old one at the same point or not at all,
and nothing after it reads the old one. Nothing after it may fail either, since a call that fails is made again as
plain Python: so no gathers, which check their indices, and no calls; all memory is allocated before. A loop that reads
nothing but such inputs, as one that counts steps, runs last.

On a GPU, stores happen in the order of the stream, as a copy would. There the loop must have a single axis: of a tile
with two sides several threads may load the same element, one of them when another has stored the new value.

The copies are alike, so ``batch_nests`` makes a kernel or two of them. A hundred running statistics so are not a
hundred results, each of which would be a tensor with memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from gradsplit.compile_core.ir.loops import (
    Access,
    BandNest,
    Load,
    LoopNest,
    LoopProgram,
    Step,
    Store,
    View,
    accesses,
    with_accesses,
)
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.step_effects import only_store, reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, compute_dtype
from gradsplit.compile_core.lowering.nests.body_builder import is_loop_dtype
from gradsplit.compile_core.lowering.nests.order_axes import simplify


def overwrite_inputs(program: LoopProgram, compute: Compute) -> LoopProgram:
    """The program that stores what ``compute.replaced`` allows into its inputs, and returns them as these results."""
    if not compute.replaced:
        return program
    results = {name: position for position, name in enumerate(compute.outputs)}
    inputs = dict(zip(compute.inputs, program.inputs, strict=True))
    returned = Counter(view.buffer for view in program.outputs if view is not None)
    written = frozenset[str]().union(*map(writes, program.steps))
    new_values: dict[str, str] = {}
    for result, given in compute.replaced.items():
        view, old = program.outputs[results[result]], inputs[given]
        if view is None or returned[view.buffer] != 1 or returned[old] or old in written:
            continue
        if _fits(program, view, old):
            new_values[view.buffer] = old
    if not new_values:
        return program
    program = _counting_last(program, new_values)
    uses = _Uses(program)
    stored = {new: old for new, old in new_values.items() if uses.may_store(new, old)}
    copied = {
        new: old for new, old in new_values.items() if new not in stored and _is_copied(program.buffers[old])
    }
    return _with_copies(_with_stores(program, stored), copied)


def _fits(program: LoopProgram, view: View, old: str) -> bool:
    """Whether a result is all of a buffer that is laid out as the input ``old``."""
    if view.buffer in (*program.inputs, *program.destinations, *program.constants):
        return False
    spec, given = program.buffers[view.buffer], program.buffers[old]
    is_whole = view.offset == 0 and (tuple(view.shape), tuple(view.stride)) == (spec.shape, spec.stride)
    return is_whole and spec == given and given.is_dense and given.device.type in ("cpu", "cuda")


def _counting_last(program: LoopProgram, new_values: Mapping[str, str]) -> LoopProgram:
    """The program with those nests at the end that read nothing but inputs with new values, and write only these."""
    read = frozenset[str]().union(*map(reads, program.steps))
    results, old_values = new_values.keys() - read, frozenset(new_values.values())

    def is_last(step: Step) -> bool:
        return cannot_fail(step) and writes(step) <= results and reads(step) <= old_values

    ordered = sorted(program.steps, key=is_last)
    return replace(program, steps=tuple(ordered))


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
        if len(self.writers.get(new, ())) != 1:
            return False
        (number,) = self.writers[new]
        nest = self.steps[number]
        if not isinstance(nest, LoopNest) or nest.reduced_axes or number < self.safe_from:
            return False
        if self.last_reader.get(old, number) > number:
            return False
        if self.buffers[old].device.type == "cuda" and len(simplify(nest).extents) > 1:
            return False
        return only_store(nest, new, old) is not None


def cannot_fail(step: Step) -> bool:
    """Whether a step runs to its end once its memory is there."""
    return isinstance(step, LoopNest) and not any(access.gathers for access in accesses(step))


def _with_stores(program: LoopProgram, stored: Mapping[str, str]) -> LoopProgram:
    return replace(
        program,
        steps=tuple(_with_names(step, stored) for step in program.steps),
        outputs=_outputs_in(program, stored),
        buffers={name: spec for name, spec in program.buffers.items() if name not in stored},
        overwritten=tuple(stored.values()),
    )


def _with_copies(program: LoopProgram, copied: Mapping[str, str]) -> LoopProgram:
    """The program that at last copies these new values to the inputs."""
    return replace(
        program,
        steps=(*program.steps, *(_copy(new, old, program.buffers[old]) for new, old in copied.items())),
        outputs=_outputs_in(program, copied),
        overwritten=(*program.overwritten, *copied.values()),
    )


def _outputs_in(program: LoopProgram, places: Mapping[str, str]) -> tuple[View | None, ...]:
    """The outputs, with some buffers' places taken by others."""
    return tuple(
        view and replace(view, buffer=places.get(view.buffer, view.buffer)) for view in program.outputs
    )


def _is_copied(spec: TensorSpec) -> bool:
    return spec.numel > 0 and is_loop_dtype(spec.dtype)


def _copy(new: str, old: str, spec: TensorSpec) -> LoopNest:
    """Both are laid out alike and without gaps: one axis is enough."""
    extents, strides = ((), ()) if spec.numel == 1 else ((spec.numel,), (1,))
    body = (Load(Access(new, strides), compute_dtype(spec.dtype)), Store(Access(old, strides), 0))
    return LoopNest(f"copy_to_{old}", extents, 0, body)


def _with_names(step: Step, stored: Mapping[str, str]) -> Step:
    if isinstance(step, BandNest):
        return replace(step, rows=_renamed(step.rows, stored))
    return _renamed(step, stored) if isinstance(step, LoopNest) else step


def _renamed(nest: LoopNest, stored: Mapping[str, str]) -> LoopNest:
    def renamed(access: Access) -> Access:
        return replace(access, buffer=stored.get(access.buffer, access.buffer))

    return replace(nest, body=with_accesses(nest.body, renamed))
