"""In which orders a backward's work may run: weight gradients that wait until all that others depend on is done.

Autograd has each layer's weight gradient beside its data gradient. What is ready last is then often what is largest,
the gradient of an embedding, and nothing hides its all-reduce. But what only one parameter's gradient needs can run at
any later time. So the last products of weight gradients are postponed after everything else, and the all-reduce of
the embedding runs under them. What they read stays in memory until then.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from gradsplit.compile_core.autograd.operators.costs import operations_of, result_bytes
from gradsplit.compile_core.autograd.operators.graph_nodes import sources_first
from gradsplit.compile_core.autograd.operators.kinds import is_fusible, is_reduction, is_view
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.torch_facts.dispatcher import is_random


def settled_order(order: Sequence[Node], results: Collection[Node]) -> list[Node]:
    """The order with what takes more memory than it is made of, as a wide copy of narrow values, right before its first
    reader, unless it is a result: less is held, and less passes from region to region."""
    late = {node for node in order if node not in results and _may_be_late(node)}
    return sources_first([node for node in order if node not in late], set(order))


def may_be_ordered(order: Sequence[Node]) -> bool:
    """Whether values alone say what must run before what."""
    schemas = (getattr(node.target, "_schema", None) for node in order)
    return not any(schema is not None and schema.is_mutable for schema in schemas)


def postponable(order: Sequence[Node], gradients: Mapping[str, Node]) -> dict[str, list[Node]]:
    """The work that may wait: by parameter, in the order in which they are ready, what only its gradient needs.

    Only work with a product in it, and without anything but products and what kernels fuse.
    """
    owners = _owners(order, gradients)
    work: dict[str, list[Node]] = {}
    for node in order:
        owner = owners[node]
        if owner is not None and not _is_part_of_another(node, owners):
            work.setdefault(owner, []).append(node)
    position = {node: number for number, node in enumerate(order)}
    ready = sorted(
        (name for name in work if _is_product(work[name])), key=lambda name: position[gradients[name]]
    )
    return {name: work[name] for name in ready}


def with_postponed(order: Sequence[Node], work: Sequence[Sequence[Node]]) -> list[Node]:
    """The order with these pieces of work at its end, one after the other."""
    moved = {node for piece in work for node in piece}
    return [*(node for node in order if node not in moved), *(node for piece in work for node in piece)]


def _owners(order: Sequence[Node], gradients: Mapping[str, Node]) -> dict[Node, str | None]:
    """For each node the one parameter whose gradient needs it; ``None`` where others need it, or nobody."""
    names: dict[Node, set[str | None]] = {}
    for name, node in gradients.items():
        names.setdefault(node, set()).add(name)
    here = set(order)
    owners: dict[Node, str | None] = {}
    for node in reversed(order):
        wanted = names.get(node, set())
        for user in node.users:
            # A result that no parameter has is returned.
            wanted = wanted | ({owners[user]} if user in here else set())
        returned = node not in names and any(user not in here for user in node.users)
        owners[node] = next(iter(wanted)) if len(wanted) == 1 and not returned else None
    return owners


def _is_part_of_another(node: Node, owners: Mapping[Node, str | None]) -> bool:
    """Whether the node picks a result of a call that others need too: it stays there, as only tensors pass on."""
    return node.target is operator.getitem and owners.get(node.all_input_nodes[0]) is None


def _is_product(work: Sequence[Node]) -> bool:
    products = [node for node in work if not is_number(node) and not is_fusible(node)]
    return bool(products) and all(operations_of(node) and not is_random(node) for node in products)


def _may_be_late(node: Node) -> bool:
    if not node.users or is_number(node) or not is_fusible(node) or is_reduction(node):
        return False
    if is_view(node):
        return node.target is not operator.getitem
    return result_bytes(node) > sum(result_bytes(source) for source in node.all_input_nodes)
