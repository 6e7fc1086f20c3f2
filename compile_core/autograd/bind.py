"""The callable that a captured graph becomes: two programs behind one ``torch.autograd.Function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_core.errors import Unsupported
from compile_core.ir.graphs import GraphSignature, PartitionedGraph, ResultAlias
from compile_core.ir.tensor_spec import TensorSpec

# torch exports it without declaring it.
foreach_copy: Any = torch._foreach_copy_  # type: ignore[attr-defined]

# Takes its inputs in a list that it may empty.
Program = Callable[[list[torch.Tensor]], Sequence[Any]]


@dataclass(frozen=True)
class BoundGraph:
    """A compiled graph, called as ``bound(*tensors)``; returns the captured graph's flat tuple of tensors.

    It behaves as the captured graph: gradients flow through it, inputs that the program changes are changed,
    results that are inputs are those very inputs. Differentiating it twice is an error.
    """

    forward: Program
    backward: Program | None
    num_outputs: int
    saved_primals: tuple[int | None, ...]
    signature: GraphSignature
    replays: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def __call__(self, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        signature = self.signature
        if self.backward is None:
            # Inputs may require gradients although no result does; ``out=`` kernels would refuse them.
            with torch.no_grad():
                outputs = [_standalone(value) for value in self.forward([*primals])]
        else:
            outputs = _CompiledGraph.apply(self, *primals)
        if signature.mutated:
            with torch.no_grad():
                for positions, updates in self.replays:
                    foreach_copy([primals[k] for k in positions], [outputs[k] for k in updates])
            for mutation in signature.mutated:
                if mutation.differentiable:
                    primals[mutation.input].copy_(outputs[mutation.output])
        return tuple(
            outputs[result] if isinstance(result, int) else _make_alias(result, primals, outputs)
            for result in signature.results
        )

    def differentiate(self, saved_and_tangents: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients; with ``create_graph=True`` as tensors that cannot be differentiated again."""
        assert self.backward is not None
        with torch.no_grad():
            gradients = self.backward(saved_and_tangents)
        if torch.is_grad_enabled():
            return _Undifferentiable.apply(torch.empty(0, requires_grad=True), *gradients)
        return gradients


def bind_autograd(graph: PartitionedGraph, forward: Program, backward: Program | None) -> BoundGraph:
    """Joins the compiled programs of ``graph`` into one differentiable callable.

    Args:
        graph: the partition that the programs were made from.
        forward: takes the primals, returns the graph's outputs and then the saved values that are not
            primals.
        backward: takes the saved values and the tangents, returns a gradient or ``None`` for each gradient
            input.
    """
    positions = {name: k for k, name in enumerate(_placeholder_names(graph.forward))}
    saved_primals = tuple(positions.get(name) for name in graph.saved)
    return BoundGraph(forward, backward, graph.num_outputs, saved_primals, graph.signature, _replays(graph))


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


class _CompiledGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: BoundGraph, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = bound.forward([*primals])
        outputs = tuple(_standalone(value) for value in results[: bound.num_outputs])
        computed = iter(results[bound.num_outputs :])
        ctx.save_for_backward(*(next(computed) if k is None else primals[k] for k in bound.saved_primals))
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        differentiable = set(bound.signature.tangents)
        ctx.mark_non_differentiable(*(out for k, out in enumerate(outputs) if k not in differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        bound: BoundGraph = ctx.bound
        signature = bound.signature
        arriving = [gradients[k] for k in signature.tangents]
        absent = {k for k, gradient in enumerate(arriving) if gradient is None}
        if len(absent) == len(arriving):
            return (None,) * len(ctx.needs_input_grad)
        tangents = [_as_specified(g, spec) for g, spec in zip(arriving, signature.tangent_specs, strict=True)]
        inputs = [*ctx.saved_tensors, *tangents]
        # What is saved lives on until the backward returns, unless it is given up here (retain_graph keeps
        # it).
        ctx.maybe_clear_saved_tensors()
        del arriving, tangents
        found = bound.differentiate(inputs)
        for_primals: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for position, gradient, sources in zip(
            signature.gradient_inputs, found, signature.gradient_tangents, strict=True
        ):
            # What only depends on gradients that did not arrive is undefined, not zero.
            if not sources or not absent.issuperset(sources):
                for_primals[position + 1] = gradient
        return tuple(for_primals)


class _Undifferentiable(torch.autograd.Function):
    """Passes gradients on as results of an operation whose own backward is an error.

    Without it they would count as constants, and a gradient penalty would silently do nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, root: torch.Tensor, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise Unsupported(
            "double-backward",
            "the gradients of a compiled graph are differentiated",
            "call the module uncompiled where create_graph=True is needed, as for a gradient penalty",
        )


def _as_specified(gradient: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """The arriving gradient in the layout that the backward was traced with; zeros where none arrived."""
    if (
        gradient is not None
        and _has_layout(gradient, spec)
        and not gradient.is_conj()
        and not gradient.is_neg()
    ):
        return gradient
    expected = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return expected.zero_() if gradient is None else expected.copy_(gradient)


def _has_layout(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    stride = tuple(tensor.stride())
    if stride == spec.stride:
        return True
    # Strides of dims of one element say nothing.
    return all(n == 1 or a == b for n, a, b in zip(spec.shape, stride, spec.stride, strict=True))


def _standalone(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not take for a view: users may change a result in place.

    It shares its version counter with the original, so that a change is noticed where the original is saved.
    """
    return value.detach() if value._is_view() else value


def _make_alias(
    alias: ResultAlias, primals: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    source = (primals if alias.of_input else outputs)[alias.position]
    if alias.detached:
        source = source.detach()
    if alias.view is None:
        return source
    size, stride, offset = alias.view
    return source.as_strided(size, stride, source.storage_offset() + offset)


def _placeholder_names(module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]
