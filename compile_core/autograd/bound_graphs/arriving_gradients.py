"""Gradients on their way into a compiled backward, which was traced for one layout of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.ir.bit_sets import is_within
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import graph_inputs
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, in_memory_order, same_strides
from gradsplit.compile_core.torch_facts.autograd_engine import is_batched_by_autograd, top_transform
from gradsplit.compile_core.torch_facts.dispatcher import is_zero_tensor


@dataclass(frozen=True)
class ArrivalFlags:
    """What a backward is told of the gradients that did not arrive; see ``GraphSignature.presence``.

    Attributes:
        sources: for each flag, the tangents of which any has arrived, as a bit set.
        some: the flags if so.
        none: the flags if not.
    """

    sources: tuple[int, ...]
    some: tuple[torch.Tensor, ...]
    none: tuple[torch.Tensor, ...]

    @staticmethod
    def of(graph: PartitionedGraph) -> ArrivalFlags:
        assert graph.backward is not None
        presence = graph.signature.presence
        inputs = graph_inputs(graph.backward)
        devices = [flag.meta["val"].device for flag in inputs[len(inputs) - len(presence) :]]
        some, none = (
            tuple(torch.tensor(value, device=device) for device in devices) for value in (True, False)
        )
        return ArrivalFlags(presence, some, none)

    def without(self, absent: int) -> Sequence[torch.Tensor]:
        """The flags where these tangents, a bit set, are missing."""
        if not absent:
            return self.some
        flags = zip(self.sources, self.some, self.none, strict=True)
        return [none if is_within(sources, absent) else some for sources, some, none in flags]


def as_specified(gradient: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """The gradient in the layout of ``spec``; zeros where none arrived."""
    if gradient is not None and gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if (
        gradient is not None
        and same_strides(spec.shape, gradient.stride(), spec.stride)
        and not gradient.is_conj()
        and not gradient.is_neg()
        and not is_zero_tensor(gradient)
    ):
        return gradient
    expected = spec.empty()
    return expected.zero_() if gradient is None else expected.copy_(gradient)


def are_batched(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether many gradients arrive as one tensor of ``vmap`` (``is_grads_batched``), which has no memory itself."""
    return top_transform() is not None or any(
        gradient is not None and is_batched_by_autograd(gradient) for gradient in gradients
    )


def batched_as_specified(gradient: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """The same where they are batched: each gradient of the batch gets the layout, which is dense."""
    if gradient is None:
        return as_specified(None, spec)
    return in_memory_order(gradient.resolve_conj().resolve_neg(), spec)
