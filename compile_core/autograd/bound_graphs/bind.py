"""The callable that a captured graph becomes: its programs, and what is done round them at each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.autograd.bound_graphs.compiled_call import (
    DifferentiableProgram,
    call_program,
    standalone_outputs,
)
from gradsplit.compile_core.autograd.bound_graphs.double_backward import DifferentiableBackward
from gradsplit.compile_core.autograd.bound_graphs.returned_draws import returning_draws
from gradsplit.compile_core.autograd.bound_graphs.spent_history import with_spent_history
from gradsplit.compile_core.autograd.bound_graphs.stored_gradients import StoredGradients
from gradsplit.compile_core.autograd.bound_graphs.updated_inputs import CopyGroup, copy_groups
from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.graphs import (
    Detachment,
    GraphSignature,
    PartitionedGraph,
    ResultAlias,
    resolve_sizes,
)
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled


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
        replays: changes that autograd does not see, left to do when the program has run; see ``copy_groups``.
        changes_inputs: there are changes left to do.
        returns_outputs: nothing at all is left to do.
    """

    forward: Program
    differentiable: DifferentiableProgram | None
    signature: GraphSignature
    replays: tuple[CopyGroup, ...]
    enables_gradients: bool
    changes_inputs: bool
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
        if signature.spent:
            outputs = with_spent_history(outputs, signature.spent)
        if self.changes_inputs:
            with torch.no_grad():
                for group in self.replays:
                    group.store([primals[k] for k in group.inputs], outputs)
            for mutation in signature.mutated:
                if mutation.differentiable:
                    primals[mutation.input].copy_(outputs[mutation.output])
        sizes = outputs[len(outputs) - signature.open_sizes :]
        detached: dict[Detachment, torch.Tensor] = {}
        return tuple(
            outputs[result]
            if isinstance(result, int)
            else _make_alias(result, primals, outputs, sizes, detached)
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
    updated: Mapping[int, int] | None = None,
    stored: StoredGradients | None = None,
    *,
    own_nodes: bool = False,
) -> BoundGraph:
    """Joins the compiled programs of ``graph`` into one differentiable callable.

    Args:
        graph: the partition that the programs were made from.
        forward: takes the primals, returns the graph's outputs and then the saved values that are not
            primals.
        backward: takes the saved values and the tangents, returns a gradient or ``None`` for each gradient
            input.
        differentiable_backward: computes gradients that are to be differentiated.
        updated: outputs that ``forward`` itself has stored into inputs; see ``updated_inputs``.
        stored: gradients that ``backward`` stores for a communicator and does not return.
        own_nodes: autograd gets a node for each result, if there are several.

    The grad mode must be that in which the graph was traced.
    """
    if not graph.signature.mutated:
        forward = returning_draws(forward, graph.forward)
    left = [mutation for mutation in graph.signature.mutated if mutation.output not in (updated or {})]
    unseen = [(change.input, change.output) for change in left if not change.differentiable]
    differentiable = None
    results = graph.signature.results
    has_gradients = backward is not None or any(
        isinstance(result, ResultAlias) and result.view is not None and result.with_gradients
        for result in results
    )
    if backward is not None:
        differentiable = DifferentiableProgram.of(
            graph, forward, backward, differentiable_backward, updated or {}, stored, own_nodes
        )
    return BoundGraph(
        forward=forward,
        differentiable=differentiable,
        signature=graph.signature,
        replays=copy_groups(graph, unseen),
        enables_gradients=has_gradients and not torch.is_grad_enabled(),
        changes_inputs=bool(left),
        returns_outputs=not graph.signature.mutated
        and not graph.signature.spent
        and results == tuple(range(graph.num_outputs)),
    )


def _make_alias(
    alias: ResultAlias,
    primals: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    detached: dict[Detachment, torch.Tensor],
) -> torch.Tensor:
    source = (primals if alias.of_input else outputs)[alias.position]
    cut = alias.detached
    if cut is not None:
        if cut not in detached:
            detached[cut] = source.detach() if cut.is_counted else source.data
        source = detached[cut]
    if alias.view is None:
        return source
    if alias.fake is not None:
        return alias.fake._view_func_unsafe(source)  # type: ignore[attr-defined]
    size, stride, (offset,) = (resolve_sizes(part, sizes) for part in (*alias.view[:2], alias.view[2:]))
    return source.as_strided(size, stride, source.storage_offset() + offset)
