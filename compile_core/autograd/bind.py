"""The callable that a captured graph becomes: its programs, and what is done round them at each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_core.autograd.compiled_call import DifferentiableProgram, call_program, standalone_outputs
from compile_core.autograd.double_backward import DifferentiableBackward
from compile_core.autograd.returned_draws import Program, returning_draws
from compile_core.ir.graphs import GraphSignature, PartitionedGraph, ResultAlias, resolve_sizes

# torch exports these without declaring them.
foreach_copy: Any = torch._foreach_copy_  # type: ignore[attr-defined]
set_grad_enabled: Any = torch._C._set_grad_enabled  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BoundGraph:
    """A compiled graph, called as ``bound(*inputs)``; returns the captured graph's flat tuple of tensors.

    It behaves as the captured graph: gradients flow through it, inputs that the program changes are changed,
    results that are inputs are those very inputs. Differentiating it twice is an error, but with a
    ``differentiable_backward``.

    Attributes:
        forward: the program of an inference graph.
        differentiable: the programs of one with gradients.
        enables_gradients: the program does so itself, where the caller has switched them off.
        returns_outputs: nothing is left to do when the program has run.
    """

    forward: Program
    differentiable: DifferentiableProgram | None
    signature: GraphSignature
    replays: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    enables_gradients: bool
    returns_outputs: bool

    def __call__(self, *primals: Any) -> tuple[torch.Tensor, ...]:
        if self.enables_gradients:
            with torch.enable_grad():
                return self._run(primals)
        return self._run(primals)

    def _run(self, primals: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        signature = self.signature
        outputs = self._infer(primals) if self.differentiable is None else self.differentiable(primals)
        if self.returns_outputs:
            return outputs
        if signature.mutated:
            with torch.no_grad():
                for positions, updates in self.replays:
                    _replay([primals[k] for k in positions], [outputs[k] for k in updates])
            for mutation in signature.mutated:
                if mutation.differentiable:
                    primals[mutation.input].copy_(outputs[mutation.output])
        sizes = outputs[len(outputs) - signature.open_sizes :]
        return tuple(
            outputs[result] if isinstance(result, int) else _make_alias(result, primals, outputs, sizes)
            for result in signature.results
        )

    def _infer(self, primals: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs may require gradients although no result does; ``out=`` kernels would refuse them."""
        grad_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            return standalone_outputs(call_program(self.forward, [*primals]), self.signature.open_sizes)
        finally:
            set_grad_enabled(grad_enabled)


def bind_autograd(
    graph: PartitionedGraph,
    forward: Program,
    backward: Program | None,
    differentiable_backward: DifferentiableBackward | None = None,
) -> BoundGraph:
    """Joins the compiled programs of ``graph`` into one differentiable callable.

    Args:
        graph: the partition that the programs were made from.
        forward: takes the primals, returns the graph's outputs and then the saved values that are not
            primals.
        backward: takes the saved values and the tangents, returns a gradient or ``None`` for each gradient
            input.
        differentiable_backward: computes gradients that are to be differentiated.

    The grad mode must be that in which the graph was traced.
    """
    if not graph.signature.mutated:
        forward = returning_draws(forward, graph.forward)
    differentiable = None
    if backward is not None:
        differentiable = DifferentiableProgram.of(graph, forward, backward, differentiable_backward)
    return BoundGraph(
        forward=forward,
        differentiable=differentiable,
        signature=graph.signature,
        replays=_replays(graph),
        enables_gradients=backward is not None and not torch.is_grad_enabled(),
        returns_outputs=not graph.signature.mutated
        and graph.signature.results == tuple(range(graph.num_outputs)),
    )


def _replays(graph: PartitionedGraph) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The changes that autograd does not see, one group a dtype: fifty batch norms make a hundred and fifty.

    Each group is the positions of the primals and those of the graph's outputs that replace them.
    """
    primals = graph.forward.graph.find_nodes(op="placeholder")
    groups: dict[torch.dtype, list[tuple[int, int]]] = {}
    for mutation in graph.signature.mutated:
        if not mutation.differentiable:
            dtype = primals[mutation.input].meta["val"].dtype
            groups.setdefault(dtype, []).append((mutation.input, mutation.output))
    return tuple(
        (tuple(position for position, _ in group), tuple(output for _, output in group))
        for group in groups.values()
    )


def _replay(changed: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Gives tensors their new values. Where the program has stored one there already, autograd is told only."""
    stored = [tensor for tensor, value in zip(changed, values, strict=True) if value is tensor]
    if not stored:
        foreach_copy(changed, values)
        return
    # What is made in inference mode has no versions.
    torch.autograd.graph.increment_version([tensor for tensor in stored if not tensor.is_inference()])
    pairs = [(tensor, value) for tensor, value in zip(changed, values, strict=True) if value is not tensor]
    if pairs:
        foreach_copy([tensor for tensor, _ in pairs], [value for _, value in pairs])


def _make_alias(
    alias: ResultAlias,
    primals: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> torch.Tensor:
    source = (primals if alias.of_input else outputs)[alias.position]
    if alias.detached:
        source = source.detach()
    if alias.view is None:
        return source
    size, stride, (offset,) = (resolve_sizes(part, sizes) for part in (*alias.view[:2], alias.view[2:]))
    return source.as_strided(size, stride, source.storage_offset() + offset)
