"""Saved values whose later change plain PyTorch would not notice, since none of its operations has saved them.

A program saves inputs and results of its graph where that costs nothing: what it computes from them it computes again.
Where they are changed in place before the backward, it needs copies. Ordinary programs change nothing, so copies are
made until the first backward only, which sees whether they were needed. Limits: a program that begins to change them
later gets autograd's error once; parameters, which optimizers change, more than the program saves anyway and what CUDA
graphs find by its address are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.autograd.operators.costs import result_bytes
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import graph_inputs
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

# Calls without any backward, as in an evaluation, that make copies.
_MOST_CALLS = 100
# Bytes that may be copied besides as many as the program saves.
_FEW_BYTES = 1 << 20

# Empty tensors that count the changes of others, and how often these had been changed.
Watched = list[tuple[torch.Tensor, int]]


@dataclass
class LaterChanges:
    """What a program has learned of the values that it saves.

    Attributes:
        positions: among what is saved, of values in memory that others see.
        calls_left: of those that make copies.
    """

    positions: tuple[int, ...]
    calls_left: float = _MOST_CALLS

    @staticmethod
    def of(graph: PartitionedGraph) -> LaterChanges | None:
        """``None`` if plain PyTorch notices every change that matters."""
        assert graph.backward is not None
        positions, left = [], graph.saved_bytes + _FEW_BYTES
        for k, node in enumerate(graph_inputs(graph.backward)[: len(graph.saved)]):
            if graph.saved[k] in graph.unnoticed:
                needed = result_bytes(node)
                if needed <= left:
                    positions.append(k)
                    left -= needed
        return LaterChanges(tuple(positions)) if positions else None

    def copy(self, saved: Sequence[Any]) -> tuple[tuple[Any, ...], Watched]:
        """What is to be saved instead, and what tells later whether that was needed."""
        self.calls_left -= 1
        found, watched = [*saved], []
        for k in self.positions:
            tensor = saved[k]
            # There is none of what a CUDA graph keeps to itself.
            if tensor is None or isinstance(tensor, torch.nn.Parameter):
                continue
            found[k] = _copy(tensor)
            if not tensor.is_inference():
                # It shares the count with the tensor, and not the memory.
                counter = tensor.detach()
                counter.data = tensor.new_empty(0)
                watched.append((counter, counter._version))
        return tuple(found), watched

    def learn(self, watched: Watched) -> None:
        """What is known in a backward."""
        if any(counter._version != version for counter, version in watched):
            self.calls_left = math.inf
        elif self.calls_left < math.inf:
            self.calls_left = 0

    def expect(self) -> None:
        """There are changes from now on."""
        self.calls_left = math.inf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides, also of an expanded tensor."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    memory = tensor.detach().as_strided((TensorSpec.of(tensor).span,), (1,))
    return memory.clone().as_strided(tensor.shape, tensor.stride(), 0)
