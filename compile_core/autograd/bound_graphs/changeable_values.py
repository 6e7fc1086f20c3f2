"""Saved values that a program may change after all, since no gradient that arrives and is asked for depends on them.

To autograd a compiled graph is one node, which unpacks all that it has saved, whichever of its gradients arrive and are
asked for. In plain PyTorch each operator unpacks its own, and only when the engine comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.autograd.operators.gradient_sources import Sources, inputs_that_matter
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import SavedTensor

# Torch 2.11 does not unpack a saved tensor by itself, with a look at its version.
_UNPACKS_ONE = hasattr(SavedTensor, "unpack")  # type: ignore[attr-defined]


# Versions of what is watched, and shapes and strides by position.
Noted = tuple[list[int], dict[int, tuple[Sequence[int], Sequence[int]]]]


@dataclass(frozen=True)
class ChangeableValues:
    """What is saved of a graph with several results or inputs.

    Attributes:
        watched: positions among what is saved of the graph's own outputs, whose change autograd notices only when a
            node unpacks everything at once; of all where it unpacks nothing else.
        open: positions of what has open sizes.
    """

    graph: PartitionedGraph
    watched: tuple[int, ...]
    open: tuple[int, ...]

    @staticmethod
    def of(graph: PartitionedGraph) -> ChangeableValues:
        results = graph_results(graph.forward)[: graph.num_outputs]
        names = {node.name for node in results if node is not None and not is_number(node)}
        numbers = {node.name for node in graph.forward.graph.nodes if is_number(node)}
        tensors = [name for name in graph.saved if name not in numbers]
        assert graph.backward is not None
        inputs = graph_inputs(graph.backward)[: len(tensors)]
        return ChangeableValues(
            graph,
            tuple(k for k, name in enumerate(tensors) if name in names or not _UNPACKS_ONE),
            tuple(k for k, node in enumerate(inputs) if TensorSpec.of(node.meta["val"]).is_open),
        )

    def note(self, saved: Sequence[Any]) -> Noted:
        """What is to be remembered of values that are saved."""
        versions = [_version(saved[k]) for k in self.watched]
        tensors = ((k, saved[k]) for k in self.open)
        return versions, {k: (tensor.shape, tensor.stride()) for k, tensor in tensors if tensor is not None}

    def unpack(
        self, saved: Sequence[Any], noted: Noted, absent: Sources, unwanted: frozenset[int]
    ) -> list[torch.Tensor | None] | None:
        """Torch's ``SavedTensor``s as tensors, and zeros for what was changed and matters to no gradient: it may
        have another size by now, and an index may lead anywhere. ``None`` if one that matters has been changed.

        Args:
            absent: the tangents that do not arrive, as a bit set.
            unwanted: positions of the gradients that nobody has asked for.
        """
        backward = self.graph.backward
        assert backward is not None
        inputs = graph_inputs(backward)
        tangents = [node.name for node in inputs[len(self.graph.saved) :]]
        signature = self.graph.signature
        matter = inputs_that_matter(
            backward.graph, tangents[: len(signature.tangents)], signature.gradient_tangents, absent, unwanted
        )
        versions, layouts = noted
        version_of = dict(zip(self.watched, versions, strict=True))
        found: list[torch.Tensor | None] = []
        for k, (node, each) in enumerate(zip(inputs, saved, strict=False)):
            fake = node.meta["val"]
            if each.data is None:
                # A CUDA graph keeps it to itself.
                found.append(None)
            elif not _is_changed(each, version_of.get(k)):
                hook = each.unpack_hook
                found.append(each.data if hook is None else hook(each.data))
            elif node.name in matter:
                return None
            else:
                found.append(_zeros(*layouts.get(k, (fake.shape, fake.stride())), fake))
        return found


def _is_changed(saved: Any, version: int | None) -> bool:
    """Whether autograd would refuse it.

    Args:
        version: that it had, if it has been noted.
    """
    if saved.unpack_hook is not None:
        # What a hook for saved tensors has packed is as it was.
        return False
    if version is not None:
        return _version(saved.data) != version
    try:
        saved.unpack()
    except RuntimeError:
        return True
    return False


def _zeros(shape: Sequence[int], stride: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the very strides, also where elements share memory."""
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.zeros(max(reach, 0), dtype=like.dtype, device=like.device).as_strided(shape, stride)


def _version(tensor: torch.Tensor | None) -> int:
    # There is none of what a CUDA graph keeps to itself.
    return -1 if tensor is None else tensor._version
