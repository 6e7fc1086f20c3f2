"""What a backward costs if its nodes run in a given order: time and memory, estimated and not measured.

The estimate knows that generated kernels fuse: between two calls of torch's kernels everything pointwise and every
reduction is taken for one kernel, whose inner values never lie in memory. What a call reads or returns, what is read
after a later call, and what the backward returns does. A gradient that is stored in a bucket takes no memory beside
the bucket's.

Only ratios of times matter to whoever plans with them: which work is long enough to hide which all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from gradsplit.compile_core.autograd.operators.costs import moved_bytes, operations_of, result_bytes
from gradsplit.compile_core.autograd.operators.graph_nodes import memory_of
from gradsplit.compile_core.autograd.operators.kinds import is_fusible, is_view, packet
from gradsplit.compile_core.ir.numbers import is_number

aten = torch.ops.aten

# These read of their first argument only what they return.
_GATHERS = (aten.embedding, aten.index, aten.gather, aten.index_select)


@dataclass(frozen=True)
class Rates:
    """How fast a device computes.

    Attributes:
        narrow_per_s: floating-point operations a second in products of 16-bit floats.
        wide_per_s: those of other types.
        bytes_per_s: of its memory.
        start_s: what starting a kernel takes.
    """

    narrow_per_s: float
    wide_per_s: float
    bytes_per_s: float
    start_s: float


# An H100 or H200 at what products reach in a model; a few cores of a CPU.
GPU_RATES = Rates(narrow_per_s=6e14, wide_per_s=2.5e14, bytes_per_s=3e12, start_s=2e-6)
CPU_RATES = Rates(narrow_per_s=2e11, wide_per_s=2e11, bytes_per_s=2e10, start_s=2e-6)


@dataclass(frozen=True)
class NodeFacts:
    """What is known of a node whatever the order.

    Attributes:
        kind: a view or a number is ``free``; a ``call`` of one of torch's kernels is fused with nothing; other nodes
            are ``fused``; an ``input`` is there.
        memory: the node whose memory the value lies in.
        bytes: of the value.
        readers: what reads the value's elements, itself or through views.
        seconds: the time of a call.
    """

    kind: Literal["free", "call", "fused", "input"]
    memory: Node
    bytes: int
    readers: tuple[Node, ...]
    seconds: float = 0.0


def node_facts(nodes: Iterable[Node], rates: Rates) -> dict[Node, NodeFacts]:
    """Facts by node, for all nodes of a graph in order."""
    found: dict[Node, NodeFacts] = {}
    for node in reversed(list(nodes)):
        if node.op == "output":
            continue
        readers: dict[Node, None] = {}
        for user in node.users:
            if user.op != "output":
                free = found[user].kind == "free"
                readers.update(dict.fromkeys(found[user].readers if free else [user]))
        kind = _kind(node)
        found[node] = NodeFacts(
            kind,
            memory_of(node),
            result_bytes(node),
            tuple(readers),
            _call_seconds(node, rates) if kind == "call" else 0.0,
        )
    return found


def _kind(node: Node) -> Literal["free", "call", "fused", "input"]:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if is_view(node) or is_number(node):
        return "free"
    return "fused" if is_fusible(node) else "call"


def _call_seconds(node: Node, rates: Rates) -> float:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    are_narrow = any(value.dtype.itemsize <= 2 for value in floats)
    operations_s = operations_of(node) / (rates.narrow_per_s if are_narrow else rates.wide_per_s)
    return rates.start_s + max(operations_s, moved_bytes(node) / rates.bytes_per_s)


class OrderCosts:
    """The costs of nodes that run in an order.

    Attributes:
        order: nodes that compute, each after what it reads.
        facts: of them and of the inputs.
        stored: nodes whose values are stored in buckets.
        returned: nodes whose values are returned.
        kernels: by node, the number of calls before it; fused nodes of one number are one kernel.
        in_memory: nodes whose values lie in memory.
    """

    def __init__(
        self,
        order: Sequence[Node],
        facts: Mapping[Node, NodeFacts],
        stored: Collection[Node],
        returned: Collection[Node] = (),
    ) -> None:
        self.order, self.facts = order, facts
        # A gradient that is all of a product seen another way is computed in its place, too.
        self.stored = {
            facts[node].memory for node in stored if facts[facts[node].memory].bytes == facts[node].bytes
        }
        self.stored.update(stored)
        self.returned = {facts[node].memory for node in returned}
        self.position = {node: number for number, node in enumerate(order)}
        self.kernels: dict[Node, int] = {}
        calls = 0
        for node in order:
            self.kernels[node] = calls
            calls += facts[node].kind == "call"
        self.in_memory = {node for node in order if self._lies_in_memory(node)}

    def _lies_in_memory(self, node: Node) -> bool:
        facts = self.facts[node]
        if facts.kind == "free":
            return False
        if facts.kind == "call" or node in self.returned or node in self.stored:
            return True
        kernel = self.kernels[node]
        return any(
            self.kernels[reader] != kernel or self.facts[reader].kind == "call" for reader in facts.readers
        )

    def seconds(self, rates: Rates) -> list[float]:
        """The time of each node, in order."""
        read_by: dict[Node, int] = {}
        found = []
        for node in self.order:
            facts = self.facts[node]
            if facts.kind == "fused":
                found.append(self._kernel_bytes(node, read_by) / rates.bytes_per_s)
            else:
                found.append(facts.seconds)
        return found

    def _kernel_bytes(self, node: Node, read_by: dict[Node, int]) -> int:
        """What the node adds to the traffic of its kernel, which reads a value once."""
        kernel = self.kernels[node]
        total = self.facts[node].bytes if node in self.in_memory else 0
        for source in node.all_input_nodes:
            memory = self.facts[source].memory
            if self.facts[memory].kind == "input":
                inside = False
            else:
                inside = memory not in self.in_memory or (
                    self.facts[memory].kind == "fused" and self.kernels[memory] == kernel
                )
            if not inside and read_by.get(memory) != kernel:
                read_by[memory] = kernel
                total += self.facts[node if packet(node) in _GATHERS else source].bytes
        return total

    def live_bytes(self) -> list[int]:
        """The bytes that are alive while each node runs: what is saved and read later, what was computed and is read
        later or returned, and the node's own reads and result."""
        last_read: dict[Node, int] = {}
        for number, node in reversed(list(enumerate(self.order))):
            if self.facts[node].kind == "free":
                continue
            # What stays inside a kernel is computed where it is read.
            read_at = number if node in self.in_memory else max(number, last_read.get(node, 0))
            last_read.setdefault(node, number)
            for source in node.all_input_nodes:
                memory = self.facts[source].memory
                last_read[memory] = max(last_read.get(memory, 0), read_at)
        last_read.update(dict.fromkeys(self.returned, len(self.order)))
        changes = [0] * (len(self.order) + 2)
        for memory, last in last_read.items():
            is_input = self.facts[memory].kind == "input"
            if is_input or (memory in self.in_memory and memory not in self.stored):
                changes[0 if is_input else self.position[memory]] += self.facts[memory].bytes
                changes[last + 1] -= self.facts[memory].bytes
        return _sums(changes[: len(self.order)])

    def split_bytes(self) -> list[int]:
        """The bytes that a cut before each node, and one after the last, would have kernels read and write more: what
        a kernel that is cut in two hands on."""
        changes = [0] * (len(self.order) + 1)
        for number, node in enumerate(self.order):
            facts = self.facts[node]
            if facts.kind != "fused":
                continue
            inside = [
                self.position[reader]
                for reader in facts.readers
                if self.kernels[reader] == self.kernels[node] and self.facts[reader].kind == "fused"
            ]
            if inside:
                # It is read once more, and written if it is not written anyway.
                size = facts.bytes * (1 if node in self.in_memory else 2)
                changes[number + 1] += size
                changes[max(inside) + 1] -= size
        return _sums(changes)


def _sums(changes: Sequence[int]) -> list[int]:
    found, total = [], 0
    for change in changes:
        total += change
        found.append(total)
    return found
