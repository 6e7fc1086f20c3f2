"""Saved values that a program may change after all, since no gradient arrives that depends on them.

To autograd a compiled graph is one node, which unpacks all that it has saved, whichever of its gradients arrive. In
plain PyTorch each operator unpacks its own, and only when a gradient comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.autograd.operators.gradient_sources import inputs_that_matter
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import SavedTensor

# Torch 2.11 does not unpack a saved tensor by itself, with a look at its version.
_UNPACKS_ONE = hasattr(SavedTensor, "unpack")  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ChangeableValues:
    """What is saved of a graph with several results.

    Attributes:
        watched: positions among what is saved of the graph's own outputs, whose change autograd notices only when a
            node unpacks everything at once; of all where it unpacks nothing else.
    """

    graph: PartitionedGraph
    watched: tuple[int, ...]

    @staticmethod
    def of(graph: PartitionedGraph) -> ChangeableValues:
        results = graph_results(graph.forward)[: graph.num_outputs]
        names = {node.name for node in results if node is not None and not is_number(node)}
        numbers = {node.name for node in graph.forward.graph.nodes if is_number(node)}
        tensors = [name for name in graph.saved if name not in numbers]
        return ChangeableValues(
            graph, tuple(k for k, name in enumerate(tensors) if name in names or not _UNPACKS_ONE)
        )

    def versions(self, saved: Sequence[Any]) -> list[int]:
        return [_version(saved[k]) for k in self.watched]

    def unpack(
        self, saved: Sequence[Any], versions: Sequence[int], absent: int
    ) -> list[torch.Tensor | None] | None:
        """Torch's ``SavedTensor``s as tensors, and zeros for what was changed and matters to no gradient: it may
        have another size by now, and an index may lead anywhere. ``None`` if one that matters has been changed.

        Limit: what is of open sizes is as it is by now.

        Args:
            absent: the tangents that do not arrive, as a bit set.
        """
        backward = self.graph.backward
        assert backward is not None
        inputs = graph_inputs(backward)
        tangents = [node.name for node in inputs[len(self.graph.saved) :]]
        matter = inputs_that_matter(backward.graph, tangents[: len(self.graph.signature.tangents)], absent)
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
                found.append(each.data if TensorSpec.of(fake).is_open else _zeros_like(fake))
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


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    """One of the very strides, also where elements share memory."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    zeros = torch.zeros(max(reach, 0), dtype=fake.dtype, device=fake.device)
    return zeros.as_strided(fake.shape, fake.stride())


def _version(tensor: torch.Tensor | None) -> int:
    # There is none of what a CUDA graph keeps to itself.
    return -1 if tensor is None else tensor._version
