"""A compiled graph that gets what is computed of its parameters alone from here: once, and again when they change.

Parameters are what they were when the values were computed if they are the same tensors, in the same memory, and
autograd has counted no change of them. Three changes it does not count, and each is noticed otherwise: a batch norm in
training changes its running statistics, which are compared with copies of them; fused optimizers change parameters, so
after a step of any optimizer all values are computed again of which a parameter requires gradients;
``parameter.data = ...`` gives a parameter other memory, which is told from the old by its storage, since a freed
address may come again. Not to be noticed are changes in place through what shares the memory without autograd's
knowledge: ``parameter.data.mul_(2)``, an array of NumPy, another process, a CUDA graph of the user's.

On a GPU a changed parameter's values are computed again into the memory where they were, so a CUDA graph that reads
them there goes on to be right. Each set of parameters has values of its own (equal layers of a model share their
program), which go when one of the parameters does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradsplit.compile_core.ir.graphs import FoldedValues
from gradsplit.compile_core.ir.kept_calls import in_layout
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.optimizers import hear_of_steps, rounds_of_steps
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast

_version, _storage = attrgetter("_version"), attrgetter("_cdata")


class FoldedGraph:
    """Called with a graph's inputs, it runs ``run`` with these and the values.

    Args:
        run: the compiled graph.
        parameters: gives the values.
    """

    def __init__(self, run: Callable[..., Any], parameters: FoldedParameters) -> None:
        self.run = run
        self._parameters = parameters

    @property
    def programs(self) -> Any:
        return self.run.programs  # type: ignore[attr-defined]

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        return self.run(*inputs, *self._parameters.values_for(inputs))


class FoldedParameters:
    """The values, for each set of parameters that comes.

    Args:
        folded: how they are computed.
        is_compared: whether a parameter is to be compared with what it was, since not all changes are counted.
    """

    def __init__(self, folded: FoldedValues, is_compared: Callable[[Tensor], bool]) -> None:
        self._compute = folded.module.forward
        self._inputs = folded.inputs
        self._specs = [TensorSpec.of(node.meta["val"]) for node in graph_results(folded.module) if node]
        self._is_compared = is_compared
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, ...], _Kept] = {}
        hear_of_steps()

    def values_for(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """The values for these inputs of the graph."""
        given = [inputs[position] for position in self._inputs]
        key = tuple(map(id, given))
        kept = self._kept.get(key)
        if kept is None or not kept.is_right_for(given):
            kept = self._computed(key, given)
        return kept.values

    def _computed(self, key: tuple[int, ...], given: list[Tensor]) -> _Kept:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.is_right_for(given):
                return kept  # another thread was here first
            # Before the values: what changes meanwhile is found to differ.
            state = _State(given, self._is_compared) if _can_be_kept(given) else None
            values = self._run(given)
            if state is None:
                return _Kept(values, None, ())
            if kept is not None:
                # A CUDA graph may read them where they are.
                with torch.no_grad():
                    pairs = zip(kept.values, values, strict=True)
                    kept.values = [old.copy_(new) if old.is_cuda else new for old, new in pairs]
                kept.state = state
                return kept
            forget = partial(_forget, weakref.ref(self), key)
            kept = _Kept(values, state, [weakref.ref(tensor, forget) for tensor in given])
            self._kept[key] = kept
            return kept

    def _run(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.inference_mode(False), torch.no_grad(), without_autocast():
            values = self._compute(*given)
            memory = {*map(_storage, map(Tensor.untyped_storage, given))}
            return [_own(value, spec, memory) for value, spec in zip(values, self._specs, strict=True)]


class _State:
    """What parameters were when their values were computed."""

    def __init__(self, given: Sequence[Tensor], is_compared: Callable[[Tensor], bool]) -> None:
        # The memory is not held, but no other storage gets the address of one.
        self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
        self._storages = [reference.cdata for reference in self._references]
        self._addresses = [*map(Tensor.data_ptr, given)]
        self._versions = [*map(_version, given)]
        # Others are no optimizer's.
        self._trains = any(tensor.requires_grad for tensor in given)
        self._round = rounds_of_steps()
        self._compared = [k for k, tensor in enumerate(given) if is_compared(tensor)]
        self._before = self._joined(given)

    def holds(self, given: Sequence[Tensor]) -> bool:
        """Whether they still are; the tensors are known to be the same."""
        return (
            not (self._trains and rounds_of_steps() != self._round)
            and [*map(_version, given)] == self._versions
            and [*map(_storage, map(Tensor.untyped_storage, given))] == self._storages
            and [*map(Tensor.data_ptr, given)] == self._addresses
            and (self._before is None or torch.equal(self._joined(given), self._before))
        )

    def _joined(self, given: Sequence[Tensor]) -> Any:
        """What is to be compared, in one tensor: a call of torch for each would take longer than all other tests."""
        return torch.cat([given[k] for k in self._compared]) if self._compared else None


@dataclass
class _Kept:
    """Values, what they were computed from, and references to the parameters that end with these."""

    values: Sequence[Tensor]
    state: _State | None
    parameters: Sequence[weakref.ref[Tensor]]

    def is_right_for(self, given: Sequence[Tensor]) -> bool:
        return self.state is not None and self.state.holds(given)


def _can_be_kept(given: Sequence[Tensor]) -> bool:
    """Not of what is made in inference mode, which counts no changes, nor while a CUDA graph is captured: nothing is
    computed then."""
    if any(tensor.is_inference() for tensor in given):
        return False
    return not any(tensor.is_cuda for tensor in given) or not torch.cuda.is_current_stream_capturing()


def _own(value: Tensor, spec: TensorSpec, memory: Set[int]) -> Tensor:
    """The value in its layout and in memory that no parameter lies in; a packed weight as it is."""
    if value.layout is not torch.strided:
        return value
    value = in_layout(value, spec)
    return value.clone() if value.untyped_storage()._cdata in memory else value


def _forget(parameters: weakref.ref[FoldedParameters], key: tuple[int, ...], dead: Any) -> None:
    living = parameters()
    if living is not None:
        living._kept.pop(key, None)
