"""Parts of a graph that run alone: what they read from the rest is given to them as inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradsplit.compile_core.minimizer.outcome import copied


@dataclass(frozen=True)
class Candidate:
    """A graph and the inputs that it is tried with.

    Attributes:
        module: a placeholder for each input, calls, and an output node with a flat tuple.
        inputs: tensors and numbers, in the order of the placeholders.
        again: those of a second call, which what was compiled for the first must not answer wrongly.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    again: tuple[Any, ...] | None = None

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that compute something, in order."""
        return [node for node in self.module.graph.nodes if node.op.startswith("call")]


class _Recorded(fx.Interpreter):
    """Runs a graph and keeps a copy of each value as it was when it was made."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = copied(value)
        return value


def values_of(candidate: Candidate) -> Mapping[fx.Node, Any]:
    """The value of each node in a plain run."""
    recorded = _Recorded(candidate.module)
    torch.manual_seed(0)
    inputs = [
        value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value
        for value in map(copied, candidate.inputs)
    ]
    recorded.run(*inputs)
    return recorded.values


def subgraph(
    candidate: Candidate,
    values: Mapping[fx.Node, Any],
    kept: Collection[fx.Node],
    outputs: Sequence[fx.Node] | None = None,
    again: Mapping[fx.Node, Any] | None = None,
) -> Candidate | None:
    """The graph of some calls alone.

    Args:
        values: of all nodes.
        kept: calls; those whose values cannot be given, since they are no tensors, come with who reads them.
        outputs: what it returns; by default what no call of it reads.
        again: the values in the second call, if there is one.

    Returns:
        ``None`` if it would return nothing.
    """
    needed = _with_untensored(kept, values)
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()
    order = [node for node in candidate.module.graph.nodes if node.op != "output"]
    read = {source for node in needed for source in node.all_input_nodes}
    for node in order:
        if node in read and node not in needed and node.op != "get_attr":
            copies[node] = graph.placeholder(node.name)
            inputs.append(node)
    for node in order:
        if node in needed or (node.op == "get_attr" and node in read):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"example_value": values[node]}
    if outputs is None:
        was_returned = candidate.module.graph.output_node().all_input_nodes
        outputs = [
            node
            for node in order
            if node in needed
            and isinstance(values[node], Tensor)
            and (node in was_returned or not any(user in needed for user in node.users))
        ]
    outputs = [node for node in outputs if node in copies and isinstance(values[node], Tensor)]
    if not outputs:
        return None
    graph.output(tuple(copies[node] for node in outputs))
    given, given_again = (
        None if found is None else tuple(found[node] for node in inputs) for found in (values, again)
    )
    assert given is not None
    return Candidate(fx.GraphModule(candidate.module, graph), given, given_again)


def _with_untensored(kept: Collection[fx.Node], values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    needed = {node for node in kept if node.op.startswith("call")}
    waiting = list(needed)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            is_given = source.op in ("placeholder", "get_attr") or isinstance(values[source], Tensor)
            if source not in needed and not is_given:
                needed.add(source)
                waiting.append(source)
    return needed
