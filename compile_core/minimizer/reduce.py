"""Fewer calls, and smaller sizes, as long as the graph fails in the same way.

Calls are left out as by ddmin (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002):
halves of the graph first, then what is left without ever smaller parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor, fx

from gradsplit.compile_core.minimizer.subgraph import Candidate, subgraph, values_of

T = TypeVar("T")
Fails = Callable[[Candidate], bool]


def fewer(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """A part of the items with which it still fails, none of which can be left out alone (ddmin)."""
    parts = 2
    while len(items) >= 2:
        chunks = _chunks(items, parts)
        tried = [*chunks]
        if parts > 2:  # of two, each is what the other leaves
            tried += [[item for other in chunks if other is not chunk for item in other] for chunk in chunks]
        smaller = next((part for part in tried if fails(part)), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= len(items) // parts + 1 else max(parts - 1, 2)
            items = smaller
        elif parts >= len(items):
            return items
        else:
            parts = min(2 * parts, len(items))
    return items


def _chunks(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    bounds = [len(items) * k // parts for k in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds) if start < end]


def fewer_calls(candidate: Candidate, values: Mapping[fx.Node, Any], fails: Fails) -> Candidate:
    """The graph of fewer calls, and of fewer results.

    Args:
        values: of the graph's nodes in a plain run.
    """

    def second_of(whole: Candidate) -> Mapping[fx.Node, Any] | None:
        return None if whole.again is None else values_of(replace(whole, inputs=whole.again))

    again = second_of(candidate)

    def part_fails(calls: Sequence[fx.Node]) -> bool:
        part = subgraph(candidate, values, calls, again=again)
        return part is not None and fails(part)

    calls = fewer(candidate.calls, part_fails)
    found = (
        subgraph(candidate, values, calls, again=again) if len(calls) < len(candidate.calls) else candidate
    )
    assert found is not None
    returned = found.module.graph.output_node().all_input_nodes
    if len(returned) > 1:
        values, again = values_of(found), second_of(found)
        for result in returned:
            alone = subgraph(found, values, found.calls, [result], again)
            if alone is not None and fails(alone):
                return alone
    return found


def smaller_sizes(candidate: Candidate, fails: Fails) -> Candidate:
    """Each size as small as it gets, wherever it occurs: in the inputs, and among the arguments of calls."""
    tensors = [value for value in candidate.inputs if isinstance(value, Tensor)]
    for size in sorted({size for tensor in tensors for size in tensor.shape if size > 1}, reverse=True):
        for smaller in sorted({1, 2, 3, size // 8, size // 2} & set(range(1, size))):
            tried = _resized(candidate, size, smaller)
            if fails(tried):
                candidate = tried
                break
    return candidate


def _resized(candidate: Candidate, size: int, smaller: int) -> Candidate:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        result = value.detach()
        for dim in range(value.dim()):
            if value.shape[dim] == size:
                result = result.narrow(dim, 0, smaller)
        return result.clone().requires_grad_(value.requires_grad)

    def replaced(argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):
            return type(argument)(replaced(item) for item in argument)
        return smaller if type(argument) is int and argument == size else argument

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in candidate.module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.meta = {}
        if node.op.startswith("call"):
            copy.args = tuple(replaced(argument) for argument in copy.args)
            copy.kwargs = {name: replaced(argument) for name, argument in copy.kwargs.items()}
    module = fx.GraphModule(candidate.module, graph)
    return with_examples(Candidate(module, tuple(map(cut, candidate.inputs))))


def with_examples(candidate: Candidate) -> Candidate:
    """The same, each node with its value; what does not run stays as it is, and fails plainly when it is tried."""
    try:
        values = values_of(candidate)
    except Exception:
        return candidate
    for node, value in values.items():
        node.meta["example_value"] = value
    return candidate


def needed_passes(names: Sequence[str], fails: Callable[[frozenset[str]], bool]) -> Sequence[str]:
    """Passes that it takes to fail: none, where it fails without all.

    Args:
        fails: whether it does so without these passes.
    """
    if not names or fails(frozenset(names)):
        return ()
    return fewer(names, lambda kept: fails(frozenset(names) - frozenset(kept)))
