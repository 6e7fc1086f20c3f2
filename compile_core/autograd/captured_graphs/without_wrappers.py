"""A captured graph whose inputs and results wrap tensors becomes one of the tensors that hold their data.

Inside, it puts the wrappers together, computes with them as before, and takes results apart. So what comes after knows
plain tensors alone; in the trace operators of wrappers are what their classes make of them (``below_wrappers``).

Limits, each an ``Unsupported``: a wrapper that requires gradients and is changed under the eyes of autograd; a gradient
whose inner tensors have other sizes than those of what it is the gradient of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.wrapper_edges import (
    WrapperEdges,
    put_together,
    take_apart,
)
from gradsplit.compile_core.torch_facts.wrapper_tensors import WrapperForm, inner_tensors


@dataclass(frozen=True)
class GraphOfParts:
    """The graph of inner tensors, with fake examples of its inputs, and how it hangs together with the wrappers."""

    module: GraphModule
    examples: list[Any]
    edges: WrapperEdges


def without_wrappers(module: GraphModule, examples: Sequence[Any]) -> GraphOfParts | None:
    """The graph of the inner tensors of ``module``'s inputs and results; None where none of these is a wrapper."""
    (output,) = module.graph.find_nodes(op="output")
    returned: Sequence[Node] = output.args[0]
    inputs = tuple(WrapperForm.of(example) for example in examples)
    results = tuple(WrapperForm.of(node.meta["example_value"]) for node in returned)
    if not any((*inputs, *results)):
        return None
    changed = tuple(k for k, form in enumerate(inputs) if form and examples[k]._version)
    for position in changed:
        if examples[position].requires_grad and examples[position].grad_fn is not None:
            raise Unsupported("changed-wrapper", "a wrapper with a history in autograd is changed in place")
    tangents = tuple(
        None if form is None else _form_of_tangent(node.meta["example_value"])
        for form, node in zip(results, returned, strict=True)
    )
    given = [
        (inner, takes)
        for example, form in zip(examples, inputs, strict=True)
        if form is not None
        for inner, takes in zip(inner_tensors(example), form.takes, strict=True)
    ]
    places = {id(inner): place for place, (inner, takes) in enumerate(given) if not takes}
    passed = tuple(
        {}
        if form is None
        else {
            k: places[id(inner)]
            for k, inner in enumerate(inner_tensors(node.meta["example_value"]))
            if id(inner) in places
        }
        for form, node in zip(results, returned, strict=True)
    )
    graph = Graph()
    groups, parts, repeated = _add_inputs(graph, module, inputs, examples)
    edges = WrapperEdges(inputs, {}, results, tangents, changed, passed, repeated)
    values: dict[Node, Node] = {}
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        values[node] = _put_together(graph, edges, position, groups[position], node)
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = graph.node_copy(node, values.__getitem__)
    flat: list[Node] = []
    for tangent, node, from_inputs in zip(tangents, returned, passed, strict=True):
        taken = [values[node]] if tangent is None else _take_apart(graph, tangent, values[node])
        flat += [part for k, part in enumerate(taken) if k not in from_inputs]
    graph.output(tuple(flat))
    return GraphOfParts(GraphModule(module, graph, "GraphOfParts"), parts, edges)


def _add_inputs(
    graph: Graph, module: GraphModule, forms: Sequence[WrapperForm | None], examples: Sequence[Any]
) -> tuple[list[list[Node]], list[Any], frozenset[int]]:
    """The placeholders of each input's inner tensors, or of itself, and the examples of all; see ``WrapperEdges`` for
    those that are repeated."""
    groups: list[list[Node]] = []
    parts, repeated = [], set()
    made: dict[int, Node] = {}
    count = 0
    placeholders = module.graph.find_nodes(op="placeholder")
    for form, example, node in zip(forms, examples, placeholders, strict=True):
        groups.append([])
        for k, part in enumerate([example] if form is None else _parts_of(example, form)):
            held = form is not None and not form.takes[k]
            placeholder = made.get(id(part)) if held else None
            if placeholder is None:
                placeholder = graph.placeholder(node.name if form is None else f"{node.name}_part_{k}")
                placeholder.meta["example_value"] = part
                parts.append(part)
            else:
                repeated.add(count)
            if held:
                made[id(part)] = placeholder
            groups[-1].append(placeholder)
            count += 1
    return groups, parts, frozenset(repeated)


def _parts_of(example: torch.Tensor, form: WrapperForm) -> list[torch.Tensor]:
    return [
        part.detach().requires_grad_(example.requires_grad) if takes else part
        for part, takes in zip(inner_tensors(example), form.takes, strict=True)
    ]


def _form_of_tangent(example: Any) -> WrapperForm | None:
    """The form of gradients that arrive for a result, as its class wants them."""
    adapt = getattr(example, "__coerce_tangent_metadata__", None)
    with torch.no_grad():
        return WrapperForm.of(example.detach() if adapt is None else adapt().detach())


def _put_together(graph: Graph, edges: WrapperEdges, position: int, group: list[Node], node: Node) -> Node:
    form = edges.inputs[position]
    if form is None:
        return group[0]
    takes = form.takes
    shapes = [tuple(part.meta["example_value"].shape) for part in group]

    def gradients_of(inner: Sequence[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor | None]:
        of_gradient = WrapperForm.of(gradient)
        assert of_gradient is not None
        own = {path: part for (path, _), part in zip(form.leaves, inner, strict=True)}
        arrived = list(zip(of_gradient.leaves, inner_tensors(gradient), strict=True))
        flowing = [part for (_, flows), part in arrived if flows]
        expected = [shape for shape, flows in zip(shapes, takes, strict=True) if flows]
        others_are_own = all(_same(own.get(path), part) for (path, flows), part in arrived if not flows)
        if [tuple(part.shape) for part in flowing] != expected or not others_are_own:
            raise Unsupported(
                "wrapper-gradient",
                f"the gradient of a {form.cls.__qualname__} has other inner tensors than it",
            )
        edges.gradients[position] = of_gradient
        found = iter(flowing)
        return [next(found) if flows else None for flows in takes]

    def put_input_together(*inner: torch.Tensor) -> torch.Tensor:
        return put_together(form, inner, functools.partial(gradients_of, inner))

    made = graph.call_function(put_input_together, tuple(group))
    made.meta.update(node.meta)
    return made


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or show the same elements of one memory."""
    if one is None or one is other:
        return one is not None
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return alike and (
        not other.numel()
        or (one.untyped_storage()._cdata, one.storage_offset())
        == (other.untyped_storage()._cdata, other.storage_offset())
    )


def _take_apart(graph: Graph, tangent: WrapperForm, node: Node) -> list[Node]:
    def take_result_apart(result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(take_apart(result, lambda: tangent))

    example = node.meta["example_value"]
    made = graph.call_function(take_result_apart, (node,))
    made.meta["example_value"] = tuple(inner_tensors(example))
    parts = []
    for position, part in enumerate(made.meta["example_value"]):
        parts.append(graph.call_function(operator.getitem, (made, position)))
        parts[-1].meta["example_value"] = part
    return parts
