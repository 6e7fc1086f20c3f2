"""The callable that a captured graph becomes: two programs behind one ``torch.autograd.Function``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_core.autograd.arriving_gradients import are_batched, as_specified, batched_as_specified
from compile_core.autograd.double_backward import DifferentiableBackward, undifferentiable
from compile_core.autograd.preserved_modes import without_autocast
from compile_core.autograd.returned_draws import Program, returning_draws
from compile_core.ir.graphs import GraphSignature, PartitionedGraph, ResultAlias, resolve_sizes, resolve_spec
from compile_core.ir.numbers import is_number

# torch exports it without declaring it.
foreach_copy: Any = torch._foreach_copy_  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BoundGraph:
    """A compiled graph, called as ``bound(*inputs)``; returns the captured graph's flat tuple of tensors.

    It behaves as the captured graph: gradients flow through it, inputs that the program changes are changed,
    results that are inputs are those very inputs. Differentiating it twice is an error, but with a
    ``differentiable_backward``.

    ``enables_gradients`` says that the program does so itself, where the caller has switched them off.
    """

    forward: Program
    backward: Program | None
    num_outputs: int
    saved_primals: tuple[int | None, ...]
    saved_numbers: int
    signature: GraphSignature
    replays: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    backward_module: torch.fx.GraphModule | None
    differentiable_backward: DifferentiableBackward | None
    enables_gradients: bool

    def __call__(self, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.enables_gradients:
            with torch.enable_grad():
                return self._run(primals)
        return self._run(primals)

    def _run(self, primals: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        signature = self.signature
        if self.backward is None:
            # Inputs may require gradients although no result does; ``out=`` kernels would refuse them.
            with torch.no_grad():
                outputs = _all_standalone(_call(self.forward, [*primals]), signature)
        else:
            outputs = CompiledCall.apply(self, *primals)
        if signature.mutated:
            with torch.no_grad():
                for positions, updates in self.replays:
                    foreach_copy([primals[k] for k in positions], [outputs[k] for k in updates])
            for mutation in signature.mutated:
                if mutation.differentiable:
                    primals[mutation.input].copy_(outputs[mutation.output])
        sizes = _open_sizes(outputs, signature)
        return tuple(
            outputs[result] if isinstance(result, int) else _make_alias(result, primals, outputs, sizes)
            for result in signature.results
        )

    def differentiate(
        self, saved: list[Any], arriving: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients as values. The list of saved tensors and numbers is emptied."""
        assert self.backward is not None and self.backward_module is not None
        specs = [resolve_spec(spec, sizes) for spec in self.signature.tangent_specs]
        with torch.no_grad():
            if are_batched(arriving):
                # Only torch's own kernels can take them.
                tangents = map(batched_as_specified, arriving, specs)
                module = self.backward_module
                return _call(lambda inputs: module.forward(*inputs), [*saved, *tangents])
            saved += map(as_specified, arriving, specs)
            return _call(self.backward, saved)


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
    positions = {name: k for k, name in enumerate(_placeholder_names(graph.forward))}
    saved_primals = tuple(positions.get(name) for name in graph.saved)
    numbers = {node.name for node in graph.forward.graph.nodes if is_number(node)}
    if not graph.signature.mutated:
        forward = returning_draws(forward, graph.forward)
    return BoundGraph(
        forward,
        backward,
        graph.num_outputs,
        saved_primals,
        sum(name in numbers for name in graph.saved),
        graph.signature,
        _replays(graph),
        graph.backward,
        differentiable_backward,
        enables_gradients=backward is not None and not torch.is_grad_enabled(),
    )


def _call(program: Program, arguments: list[torch.Tensor]) -> Sequence[Any]:
    """Runs a program, whose casts are operations of its own, without the caller's autocast."""
    if not torch._C._is_any_autocast_enabled():
        return program(arguments)
    with without_autocast():
        return program(arguments)


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


class CompiledCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: BoundGraph, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _call(bound.forward, [*primals])
        outputs = tuple(_all_standalone(results[: bound.num_outputs], bound.signature))
        computed = iter(results[bound.num_outputs :])
        saved = [next(computed) if k is None else primals[k] for k in bound.saved_primals]
        tensors = len(saved) - bound.saved_numbers
        ctx.saved_numbers = saved[tensors:]
        del saved[tensors:]
        ctx.number_primals = ()
        if bound.differentiable_backward is not None:
            changed = {mutation.input for mutation in bound.signature.mutated}
            ctx.number_primals = [None if isinstance(given, torch.Tensor) else given for given in primals]
            saved += (
                primal.clone() if k in changed else primal
                for k, primal in enumerate(primals)
                if isinstance(primal, torch.Tensor)
            )
        ctx.save_for_backward(*saved)
        ctx.open_sizes = _open_sizes(outputs, bound.signature)
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        differentiable = set(bound.signature.tangents)
        ends = len(outputs) - bound.signature.open_sizes
        ctx.mark_non_differentiable(*(outputs[k] for k in range(ends) if k not in differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        bound: BoundGraph = ctx.bound
        signature = bound.signature
        arriving = [gradients[k] for k in signature.tangents]
        absent = {k for k, gradient in enumerate(arriving) if gradient is None}
        if len(absent) == len(arriving):
            return (None,) * len(ctx.needs_input_grad)
        count = len(bound.saved_primals) - bound.saved_numbers
        again = bound.differentiable_backward
        # A backward that needs nothing can be run as often as one likes.
        kept = ctx.saved_tensors if count or torch.is_grad_enabled() else ()
        saved = [*kept[:count], *ctx.saved_numbers]
        if not torch.is_grad_enabled():
            # What is saved lives on until the backward returns, unless it is given up here (retain_graph keeps
            # it).
            ctx.maybe_clear_saved_tensors()
            del kept
            found = bound.differentiate(saved, arriving, ctx.open_sizes)
        elif again is not None:
            tensors = iter(kept[count:])
            primals = [next(tensors) if number is None else number for number in ctx.number_primals]
            found = again(primals, arriving)
        else:
            sources = [*kept, *(gradient for gradient in arriving if gradient is not None)]
            found = undifferentiable(bound.differentiate(saved, arriving, ctx.open_sizes), sources, ctx)
        for_primals: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for position, gradient, depends_on in zip(
            signature.gradient_inputs, found, signature.gradient_tangents, strict=True
        ):
            # What only depends on gradients that did not arrive is undefined, not zero.
            if not depends_on or not absent.issuperset(depends_on):
                for_primals[position + 1] = gradient
        return tuple(for_primals)


def _standalone(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not take for a view: users may change a result in place.

    It shares its version counter with the original, so that a change is noticed where the original is saved.
    """
    return value.detach() if value._is_view() else value


def _all_standalone(outputs: Sequence[Any], signature: GraphSignature) -> list[Any]:
    """The graph's outputs; numbers among them, which are the last, as they are."""
    ends = len(outputs) - signature.open_sizes
    return [*map(_standalone, outputs[:ends]), *outputs[ends:]]


def _open_sizes(outputs: Sequence[Any], signature: GraphSignature) -> Sequence[int]:
    return outputs[len(outputs) - signature.open_sizes :]


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


def _placeholder_names(module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]
