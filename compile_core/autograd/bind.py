"""The callable that a captured graph becomes: two programs behind one ``torch.autograd.Function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from compile_core.ir.graphs import GraphSignature, InputAlias, PartitionedGraph
from compile_core.ir.tensor_spec import TensorSpec

Program = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


@dataclass(frozen=True)
class BoundGraph:
    """A compiled graph, called as ``bound(*tensors)``; returns the captured graph's flat tuple of tensors.

    It behaves as the captured graph: gradients flow through it, inputs that the program changes are changed, results
    that are inputs are those very inputs. Differentiating it twice is an error.
    """

    forward: Program
    backward: Program | None
    num_outputs: int
    saved_primals: tuple[int | None, ...]
    signature: GraphSignature

    def __call__(self, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        signature = self.signature
        if self.backward is None:
            # Inputs may require gradients although no result does; ``out=`` kernels would refuse them.
            with torch.no_grad():
                outputs = [_standalone(value) for value in self.forward(primals)]
        else:
            outputs = _CompiledGraph.apply(self, *primals)
        if signature.mutated:
            with torch.no_grad():
                for position, output in signature.mutated:
                    primals[position].copy_(outputs[output])
        return tuple(
            outputs[result] if isinstance(result, int) else _make_alias(result, primals)
            for result in signature.results
        )


def bind_autograd(graph: PartitionedGraph, forward: Program, backward: Program | None) -> BoundGraph:
    """Joins the compiled programs of ``graph`` into one differentiable callable.

    Args:
        graph: the partition that the programs were made from.
        forward: takes the primals, returns the graph's outputs and then the saved values that are not primals.
        backward: takes the saved values and the tangents, returns a gradient or ``None`` for each gradient input.
    """
    positions = {name: k for k, name in enumerate(_placeholder_names(graph.forward))}
    saved_primals = tuple(positions.get(name) for name in graph.saved)
    return BoundGraph(forward, backward, graph.num_outputs, saved_primals, graph.signature)


class _CompiledGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: BoundGraph, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = bound.forward(primals)
        outputs = tuple(_standalone(value) for value in results[: bound.num_outputs])
        computed = iter(results[bound.num_outputs :])
        ctx.save_for_backward(*(next(computed) if k is None else primals[k] for k in bound.saved_primals))
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        differentiable = set(bound.signature.tangents)
        ctx.mark_non_differentiable(*(out for k, out in enumerate(outputs) if k not in differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        bound: BoundGraph = ctx.bound
        signature = bound.signature
        assert bound.backward is not None
        arriving = [gradients[k] for k in signature.tangents]
        if all(gradient is None for gradient in arriving):
            return (None,) * len(ctx.needs_input_grad)
        tangents = [_as_specified(g, spec) for g, spec in zip(arriving, signature.tangent_specs, strict=True)]
        found = bound.backward([*ctx.saved_tensors, *tangents])
        for_primals: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for position, gradient in zip(signature.gradient_inputs, found, strict=True):
            for_primals[position + 1] = gradient
        return tuple(for_primals)


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


def _make_alias(alias: InputAlias, primals: Sequence[torch.Tensor]) -> torch.Tensor:
    source = primals[alias.input]
    if alias.detached:
        source = source.detach()
    if alias.view is None:
        return source
    size, stride, offset = alias.view
    return source.as_strided(size, stride, source.storage_offset() + offset)


def _placeholder_names(module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]
