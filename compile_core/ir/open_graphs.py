"""Graphs with open sizes as plain data, and the graphs that they are for given sizes.

Code generation knows static sizes only. A graph is traced and partitioned once, with its sizes open; what it is for
each combination of sizes is made of its description, which holds no fake tensors of open sizes and can be given to
another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS, expression_of, has_backed_symbols, symbols_of
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module


@dataclass(frozen=True)
class OpenTensor:
    """What is known of a strided tensor: integers, or expressions over sizes; the offset is that in its storage."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(fake: torch.Tensor) -> OpenTensor:
        shape, stride = (tuple(map(_described, numbers)) for numbers in (fake.shape, fake.stride()))
        return OpenTensor(shape, stride, _described(fake.storage_offset()), fake.dtype, fake.device)

    def empty(self) -> torch.Tensor:
        """A tensor of these sizes, which are integers, at its place in a storage of its own."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + max(last, 0) + 1, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class SizeValues:
    """What a graph is bound to: the values of its symbols, and of the numbers among its inputs by their names."""

    sizes: Mapping[sympy.Symbol, int]
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Computed:
    """The value of a number that is no size, but follows from sizes: what its node computes."""


@dataclass(frozen=True)
class NodeReference:
    """In the place of a node among arguments: its position in the graph."""

    position: int


@dataclass(frozen=True)
class OpenNode:
    """A node. Its value is what is known of it: an ``OpenTensor``, an expression, ``Computed``, or a fake tensor whose
    sizes are not open; in the structure that the node returns."""

    op: str
    name: str
    target: Any
    arguments: Any
    keywords: Any
    value: Any
    stack_trace: str | None

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, (sympy.Expr, Computed))


@dataclass(frozen=True)
class OpenGraph:
    """A graph as plain data; see ``bind``."""

    nodes: tuple[OpenNode, ...]

    @staticmethod
    def of(module: GraphModule) -> OpenGraph:
        """
        Raises:
            Unsupported: it has a number that data decide.
        """
        positions = {node: k for k, node in enumerate(module.graph.nodes)}

        def described(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return NodeReference(positions[leaf])
            return _described(leaf) if isinstance(leaf, torch.SymInt) else leaf

        return OpenGraph(
            tuple(
                OpenNode(
                    node.op,
                    node.name,
                    node.target,
                    map_aggregate(node.args, described),
                    map_aggregate(node.kwargs, described),
                    _described(node.meta.get("val")),
                    node.meta.get("stack_trace"),
                )
                for node in positions
            )
        )

    def bind(
        self, root: torch.nn.Module | dict[str, Any], values: SizeValues
    ) -> tuple[GraphModule, dict[str, Any]]:
        """The graph for these sizes, without its numbers, and these by the names of their nodes.

        Args:
            root: has the attributes that the graph reads.

        Raises:
            Unsupported: sizes do not determine a number.
        """
        binding = _Binding(values.sizes, self._mode())
        numbers = self._numbers(binding, values)
        graph = Graph()
        made: list[Any] = []

        def resolved(arguments: Any) -> Any:
            return map_aggregate(arguments, lambda leaf: _resolved(leaf, made, binding))

        for node in self.nodes:
            if node.op == "output":
                (results,) = node.arguments
                positions = [None if result is None else result.position for result in results]
                kept = [k for k in positions if k is None or not self.nodes[k].is_number]
                graph.output(tuple(None if k is None else made[k] for k in kept))
            elif node.is_number:
                made.append(numbers[node.name])
            else:
                arguments, keywords = resolved(node.arguments), resolved(node.keywords)
                new = graph.create_node(node.op, node.target, arguments, keywords, node.name)
                new.meta["val"] = binding.value(node.value)
                if node.stack_trace is not None:
                    new.meta["stack_trace"] = node.stack_trace
                made.append(new)
        return lazy_module(root, graph), numbers

    def numbers(self, values: SizeValues) -> dict[str, Any]:
        """The graph's numbers by the names of their nodes."""
        return self._numbers(_Binding(values.sizes, None), values)

    def _numbers(self, binding: _Binding, values: SizeValues) -> dict[str, Any]:
        known = dict(values.numbers)
        made: dict[int, Any] = {}
        for k, node in enumerate(self.nodes):
            if not node.is_number:
                continue
            if node.name not in known:
                known[node.name] = (
                    node.target(
                        *map_aggregate(node.arguments, lambda leaf: _resolved(leaf, made, binding)),
                        **map_aggregate(node.keywords, lambda leaf: _resolved(leaf, made, binding)),
                    )
                    if isinstance(node.value, Computed)
                    else binding.size(node.value)
                )
            made[k] = known[node.name]
        return known

    def symbols(self) -> frozenset[sympy.Symbol]:
        """The sizes that the graph depends on."""
        found: set[sympy.Symbol] = set()
        for node in self.nodes:
            for value in tree_leaves(node.value):
                numbers = (
                    (*value.shape, *value.stride, value.offset) if isinstance(value, OpenTensor) else (value,)
                )
                found.update(*(symbols_of(number) for number in numbers if isinstance(number, sympy.Expr)))
        return frozenset(found)

    def _mode(self) -> FakeTensorMode:
        values = (value for node in self.nodes for value in tree_leaves(node.value))
        modes = (getattr(value, "fake_mode", None) for value in values)
        return next((mode for mode in modes if mode is not None), None) or FakeTensorMode()


def bound_layouts(
    tensors: Mapping[int, OpenTensor], sizes: Mapping[sympy.Symbol, int]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and strides of tensors for these sizes.

    Raises:
        Unsupported: one depends on another size.
    """
    binding = _Binding(sizes, None)
    return {
        key: (binding.sizes(tensor.shape), binding.sizes(tensor.stride)) for key, tensor in tensors.items()
    }


class _Binding:
    """Integers for the symbols of a graph."""

    def __init__(self, values: Mapping[sympy.Symbol, int], mode: FakeTensorMode | None) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._mode = mode
        self._known: dict[sympy.Expr, int] = {}

    def size(self, number: Any) -> int:
        if not isinstance(number, sympy.Expr):
            return number
        found = self._known.get(number)
        if found is None:
            value: Any = number.xreplace(self._values)
            if not value.is_number:
                raise Unsupported("open-size", f"no input determines the size {number}")
            found = self._known[number] = int(value)
        return found

    def sizes(self, numbers: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(map(self.size, numbers))

    def value(self, value: Any) -> Any:
        """What a node of this value has under fake tensors."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.value, value))
        if not isinstance(value, OpenTensor):
            return value
        assert self._mode is not None
        with self._mode:
            return replace(
                value,
                shape=self.sizes(value.shape),
                stride=self.sizes(value.stride),
                offset=self.size(value.offset),
            ).empty()


def _described(value: Any) -> Any:
    """A value under fake tensors as plain data, as far as it has open sizes."""
    if isinstance(value, torch.SymInt):
        if not has_backed_symbols(value):
            raise Unsupported("open-size", f"data decide the size {value}")
        return expression_of(value)
    if isinstance(value, SYMBOLIC_NUMBERS):
        return Computed()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_described, value))
    if isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
        if value.layout is not torch.strided:
            raise Unsupported("sparse-tensor", f"a tensor of the layout {value.layout} has open sizes")
        return OpenTensor.of(value)
    return value


def _resolved(leaf: Any, made: Any, binding: _Binding) -> Any:
    """A leaf of a node's arguments in the graph that is made."""
    if isinstance(leaf, NodeReference):
        return made[leaf.position]
    return binding.size(leaf) if isinstance(leaf, sympy.Expr) else leaf
