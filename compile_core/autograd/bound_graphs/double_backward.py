"""Gradients of a compiled graph that are differentiated again (``create_graph=True``).

The compiled backward knows values only. With the option ``double_backward`` gradients that need a history are computed
by torch: the captured graph runs again from the inputs, which were kept for this, and torch's autograd differentiates
it, as often as anyone asks. Backwards that nobody differentiates stay the compiled ones. Without the option the
gradients are those of the compiled backward, and whoever differentiates them gets an error instead of zeros.

Limits: graphs that draw random numbers, which would be drawn anew, and graphs that change an input which takes
gradients run with torch's own kernels from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.graphs import GraphSignature, JointGraph
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.torch_switches import TorchModes, preserved_switches


@dataclass(frozen=True)
class DifferentiableBackward:
    """The backward of a captured graph as operations that autograd records.

    Attributes:
        module: the captured graph.
        signature: how its results are related to the outputs of the joint graph that was made from it.
        modes: torch's modes under which it was captured; a backward runs under others.
    """

    module: torch.fx.GraphModule
    signature: GraphSignature
    modes: TorchModes

    def __call__(
        self, primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """A gradient for each of the signature's gradient inputs; the history leads to the primals and tangents.

        Args:
            primals: as they were before the graph ran; none is changed.
            tangents: the gradients that arrived, as the signature orders them.
        """
        inputs = list(primals)
        # One that no gradient leads to was passed without its history.
        wanted = [position for position in self.signature.gradient_inputs if primals[position].requires_grad]
        for position in wanted:
            # Not the input itself: its hooks are for gradients that have been added up.
            inputs[position] = primals[position].view_as(primals[position])
        passed = list(inputs)
        for mutation in self.signature.mutated:
            passed[mutation.input] = passed[mutation.input].clone()
        with preserved_switches():
            self.modes.turn_on()
            torch.set_autocast_cache_enabled(False)
            results = self.module.forward(*passed)
        roots = [self._output(position, results, passed) for position in self.signature.tangents]
        arrived = [(root, g) for root, g in zip(roots, tangents, strict=True) if g is not None]
        found = torch.autograd.grad(
            [root for root, _ in arrived],
            [inputs[position] for position in wanted],
            [gradient for _, gradient in arrived],
            create_graph=True,
            allow_unused=True,
        )
        gradients = dict(zip(wanted, found, strict=True))
        return [gradients.get(position) for position in self.signature.gradient_inputs]

    def _output(self, position: int, results: Sequence[torch.Tensor], passed: Sequence[Any]) -> torch.Tensor:
        """The joint graph's output of this position: a result, what results are views of, or a changed input."""
        signature = self.signature
        for mutation in signature.mutated:
            if mutation.output == position:
                return passed[mutation.input]
        if position in signature.results:
            return results[signature.results.index(position)]
        view = next(
            result
            for result, alias in zip(results, signature.results, strict=True)
            if not isinstance(alias, int) and not alias.of_input and alias.position == position
        )
        assert view._base is not None
        return view._base


def differentiable_backward(module: torch.fx.GraphModule, joint: JointGraph) -> DifferentiableBackward:
    """What computes gradients with a history for the graph that ``joint`` was traced from, in the modes of the trace.

    Raises:
        Unsupported: one of the limits above.
    """
    explanation = "the gradients of a graph that {} are to be differentiated (double_backward=True)"
    if any(is_random(node) for node in joint.module.graph.nodes):
        raise Unsupported("double-backward", explanation.format("draws random numbers"))
    if {mutation.input for mutation in joint.signature.mutated} & set(joint.signature.gradient_inputs):
        raise Unsupported("double-backward", explanation.format("changes an input which takes gradients"))
    return DifferentiableBackward(module, joint.signature, TorchModes.now())


def undifferentiable(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor], node: Any
) -> Sequence[torch.Tensor | None]:
    """Gradients as results of an operation whose own backward is an error.

    Without it they would count as constants, and a gradient penalty would silently do nothing.

    Args:
        gradients: what the compiled backward returned.
        sources: tensors that the gradients are computed from, as far as they were saved or arrived.
        node: the autograd node of the compiled call; what it leads to, the gradients depend on.

    Raises:
        Unsupported: an input is neither a leaf nor saved, so that nothing can be made to depend on it.
    """
    reachable = [source for source in sources if source.requires_grad]
    known = [source.grad_fn for source in reachable]
    for origin, _ in node.next_functions:
        if origin is not None and origin not in known:
            if not hasattr(origin, "variable"):
                raise _refusal()
            reachable.append(origin.variable)
    return _Undifferentiable.apply(len(reachable), *reachable, *gradients)


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, count: int, *sources_and_gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        gradients = sources_and_gradients[count:]
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise _refusal()


def _refusal() -> Unsupported:
    return Unsupported(
        "double-backward",
        "the gradients of a compiled graph are differentiated, which needs options={'double_backward': True} "
        "or backend='eager'",
    )
