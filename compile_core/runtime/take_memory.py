"""Which results of kernels go into memory that the same kernel is the last to read.

A backward turns what was saved into gradients of the same size: the logits of a language model, 0.5 GiB, become their
gradient, element by element. With memory for both, that is where a step's peak lies.

The saved value must be nobody else's: a backward that is to run again (``retain_graph``), a hook on saved tensors and a
recording of CUDA graphs keep it. That is seen when the program runs, so a plan says what may be taken and the program
looks whether it is (``is_held_once``). Only GPUs do this: C++ kernels are compiled for pointers that do not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradsplit.compile_core.ir.loops import (
    GeneratedStep,
    Load,
    LoopNest,
    Reduce,
    operands,
    varied_axes,
)
from gradsplit.compile_core.ir.step_effects import only_store
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

# Less than that is not where a peak lies, and to look costs two microseconds.
LEAST_BYTES = 8 << 20
# What is made may be so much of itself longer than what it takes the memory of, one part in:
_MOST_BEYOND = 64


def memory_to_take(
    step: GeneratedStep, made: Iterable[str], read_last: Iterable[str], buffers: Mapping[str, TensorSpec]
) -> dict[str, tuple[str, ...]]:
    """For some buffers that are first touched by a step, those whose memory they may get.

    Args:
        made: they.
        read_last: what nothing touches after the step.
        buffers: the specs of both.
    """
    free = [name for name in read_last if _is_large(buffers[name])]
    if not free or not isinstance(step, LoopNest) or not _is_one_pass(step):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for new in made:
        if fits := [
            old for old in free if _fits(buffers[new], buffers[old]) and _meets_in_points(step, new, old)
        ]:
            found[new] = tuple(fits)
            free = [old for old in free if old not in fits]
    return found


def _is_large(spec: TensorSpec) -> bool:
    return spec.device.type == "cuda" and spec.span * spec.dtype.itemsize >= LEAST_BYTES


def _fits(new: TensorSpec, old: TensorSpec) -> bool:
    """Whether what is made reaches as far as the old, or a little farther: rows may have gaps, and one after the last.

    Whether there is memory behind the old is seen when the program runs.
    """
    beyond = new.numel - old.span
    return (
        _is_large(new)
        and new.is_dense
        and (new.dtype, new.device) == (old.dtype, old.device)
        and (0 <= beyond * _MOST_BEYOND <= new.numel)
    )


def _is_one_pass(nest: LoopNest) -> bool:
    """Whether a nest comes to each point once: nothing that it computes there needs a reduction to be finished."""
    reduced = range(len(nest.extents) - nest.reduced_axes, len(nest.extents))
    after: set[int] = set()
    for number, (statement, axes) in enumerate(zip(nest.body, varied_axes(nest), strict=True)):
        if isinstance(statement, Reduce):
            if statement.operation == "deviations":  # from a mean, which is known after the first pass
                return False
            after.add(number)
        elif not after.isdisjoint(operands(statement)):
            if not axes.isdisjoint(reduced):
                return False
            after.add(number)
    return True


def _meets_in_points(nest: LoopNest, new: str, old: str) -> bool:
    """Whether each point of a nest reads of ``old``, before it stores, what lies where it stores into ``new``."""
    store = only_store(nest, new, old)
    if store is None or store.reduction is not None or store.access.gathers:
        return False
    if not any(isinstance(s, Load) and s.access.buffer == old for s in nest.body):
        return False
    return all(size == 1 or step for size, step in zip(nest.extents, store.access.strides, strict=True))
