"""What a captured graph for a GPU computes on the CPU, cut off as a graph of its own that runs before it.

A CUDA graph cannot do anything on the CPU, nor read a tensor there: it would have the number of the call in which it
was recorded. So what needs nothing of the GPU is done before each call, by torch's own kernels: a random number that
decides whether a layer is skipped, positions that are made on the CPU and copied. The rest takes the results. A tensor
of one number, such as a learning rate, is read by the GPU's kernels as it is; it is put into a tensor on the GPU by a
kernel that takes it as its argument. What is known when the program is compiled stays: ``rewrites.simplify`` computes
it.

Limit: all or nothing. A graph is left whole if it does on the CPU what needs the GPU or a gradient, or changes a tensor
there: the rest would have tensors on the CPU as before, and its random numbers come in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.host_part import HostPart
from gradsplit.compile_core.torch_facts.dispatcher import tags_by_name
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module
from gradsplit.compile_core.torch_facts.thread_state import enter_autocast


def host_part(module: GraphModule, examples: Sequence[Any]) -> HostPart | None:
    """The two parts of a graph; None where it has nothing to do on the CPU, or cannot be cut.

    Args:
        examples: a fake tensor or a number for each placeholder; other nodes have theirs in ``example_value``.
    """
    devices = {example.device for example in examples if isinstance(example, Tensor) and example.is_cuda}
    if len(devices) != 1:
        return None
    (device,) = devices
    placeholders = module.graph.find_nodes(op="placeholder")
    values = {node: node.meta.get("example_value") for node in module.graph.nodes}
    values.update(zip(placeholders, examples, strict=True))
    constants = _constant_numbers(module, values)
    own = _host_nodes(module, values, constants)
    scalars = _scalars(module, own, constants, values)
    is_cut = scalars is not None and (own or scalars) and not (own and _changes_on_host(module, examples))
    return _Cut(module, own, scalars, values, device).write() if scalars is not None and is_cut else None


def moved(number: Tensor, device: torch.device) -> Tensor:
    """A tensor of one number on another device; nothing waits for that."""
    # A kernel's argument, where a copy would read memory that the program may have changed by then.
    return torch.full((), number.item(), dtype=number.dtype, device=device)


def _constant_numbers(module: GraphModule, values: Mapping[Node, Any]) -> set[Node]:
    """Tensors of one number on the CPU that are made of constants, by operators on each element."""
    found: set[Node] = set()
    for node in module.graph.nodes:
        sources = node.all_input_nodes
        is_made = node.target is torch.tensor or (
            sources and found.issuperset(sources) and _is_pointwise(node)
        )
        is_returned = any(user.op == "output" for user in node.users)
        if (node.op == "get_attr" or is_made) and _is_number(values[node]) and not is_returned:
            found.add(node)
    return found


def _is_pointwise(node: Node) -> bool:
    tags = tags_by_name(node.target)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _host_nodes(
    module: GraphModule, values: Mapping[Node, Any], constants: Collection[Node]
) -> dict[Node, None]:
    """Calls that need nothing of the GPU and give tensors of the CPU, or copy one to the GPU."""
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in constants:
            continue
        sources = node.all_input_nodes
        taken, given = _tensors([values[source] for source in sources]), _tensors(values[node])
        copies = any(tensor.dim() > 0 for tensor in taken)
        if (
            all(s in found or s in constants or s.op in ("placeholder", "get_attr") for s in sources)
            and given
            and all(map(_may_be_cut_off, taken))
            and all(_may_be_cut_off(tensor) or (copies and tensor.is_cuda) for tensor in given)
        ):
            found[node] = None
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _may_be_cut_off(tensor: Tensor) -> bool:
    return (
        _is_on_host(tensor)
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor._has_symbolic_sizes_strides
    )


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _scalars(
    module: GraphModule, own: Collection[Node], constants: Collection[Node], values: Mapping[Node, Any]
) -> list[Node] | None:
    """The tensors of one number that the rest reads on the CPU; None if it does anything else there."""
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in own or node in constants:
            continue
        given = _tensors(values[node])
        if any(map(_is_on_host, given)) or (node.target is enter_autocast and "cpu" in node.args):
            return None
        for source in node.all_input_nodes:
            if source not in constants and any(map(_is_on_host, _tensors(values[source]))):
                if not given or not _is_number(values[source]):
                    return None
                found[source] = None
    return list(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and _may_be_cut_off(value)


def _changes_on_host(module: GraphModule, examples: Sequence[Any]) -> bool:
    try:
        points = find_cut_points(module, examples)
    except Unsupported:
        return True
    return any(map(_is_on_host, _tensors([points.values[node] for node in points.changed_at])))


@dataclass
class _Cut:
    """Writes the two graphs."""

    module: GraphModule
    own: Collection[Node]
    scalars: Sequence[Node]
    values: Mapping[Node, Any]
    device: torch.device
    _host: Graph = field(default_factory=Graph)
    _copies: dict[Node, Node] = field(default_factory=dict)
    _inputs: list[Node] = field(default_factory=list)

    def write(self) -> HostPart:
        (output,) = self.module.graph.find_nodes(op="output")
        placeholders = self.module.graph.find_nodes(op="placeholder")
        results: Sequence[Node] = output.args[0]  # type: ignore[assignment]
        # Numbers are moved; what is a tensor on the GPU by now is taken as it is.
        handed = [node for node in self.own if node not in self.scalars and self._is_read(node)]
        taken = [node for node in placeholders if self._is_taken(node)]
        here = {*self.own, *self.scalars, *placeholders}.difference(taken)
        returned = [node for node in dict.fromkeys(results) if node in here]
        kept = [node for node in results if node not in here]
        for node in (*self.own, *self.scalars, *returned):
            self._copy_to_host(node)
        moves = [self._host.call_function(moved, (self._copies[node], self.device)) for node in self.scalars]
        passed = [*(self._copies[node] for node in handed), *moves]
        self._host.output((*passed, *(self._copies[node] for node in returned)))
        places = iter(range(len(kept)))
        return HostPart(
            lazy_module(self.module, self._host),
            lazy_module(self.module, self._rest(taken, handed, kept)),
            tuple(map(placeholders.index, self._inputs)),
            tuple(map(placeholders.index, taken)),
            len(passed),
            tuple(
                (True, len(passed) + returned.index(node)) if node in here else (False, next(places))
                for node in results
            ),
            bool(self.own),
        )

    def _is_read(self, node: Node) -> bool:
        """Whether the rest takes it, but for its results."""
        return any(user not in self.own and user.op != "output" for user in node.users)

    def _is_taken(self, node: Node) -> bool:
        """Of what lies on the CPU only what is neither read here nor moved. The rest is taken, read or not: it may
        determine a size."""
        value = self.values[node]
        is_here = (
            isinstance(value, Tensor) and _is_on_host(value) and any(user in self.own for user in node.users)
        )
        return node not in self.scalars and not is_here

    def _copy_to_host(self, node: Node) -> None:
        if node in self._copies:
            return
        if node.op == "placeholder":
            self._copies[node] = _placeholder(self._host, node.name, self.values[node])
            self._inputs.append(node)
            return
        for source in node.all_input_nodes:
            self._copy_to_host(source)
        self._copies[node] = self._host.node_copy(node, self._copies.__getitem__)

    def _rest(self, taken: Sequence[Node], handed: Sequence[Node], kept: Sequence[Node]) -> Graph:
        rest = Graph()
        copies = {node: _placeholder(rest, node.name, self.values[node]) for node in (*taken, *handed)}
        for node in self.scalars:
            copies[node] = _placeholder(rest, node.name, self._on_device(self.values[node]))
        for node in self.module.graph.nodes:
            is_constant_of_host = node.op == "get_attr" and not self._is_read(node)
            if not (
                node in copies
                or node in self.own
                or node.op in ("placeholder", "output")
                or is_constant_of_host
            ):
                copies[node] = rest.node_copy(node, copies.__getitem__)
        rest.output(tuple(copies[node] for node in kept))
        return rest

    def _on_device(self, number: Any) -> Tensor:
        with number.fake_mode:
            return torch.empty((), dtype=number.dtype, device=self.device)


def _placeholder(graph: Graph, name: str, example: Any) -> Node:
    made = graph.placeholder(name)
    made.meta["example_value"] = example
    return made
