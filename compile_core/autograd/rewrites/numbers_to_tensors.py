"""Stage between partition and code generation: numbers become tensors of one element, which kernels can read.

Sizes stay, and what follows from them: programs have these built in. A float that the graph takes, such as a learning
rate, and a float read out of a tensor, such as a step count, are known when the graph runs. Here each is a ``float64``
tensor without dims, what Python computes with them is computed by operators in the same order and precision, and an
operator that takes such a number takes the tensor, rounded to the dtype in which it computes. No value is waited for: a
step count on an accelerator stays there. Numbers of the CPU that an accelerator's kernels read are copied there
together.

Integers out of tensors stay numbers where an operator takes them, and so does what is computed from these: such
operators run with torch's kernels.

Limits, each an ``Unsupported``: operators that take no tensor for a number. A division by zero gives an infinity
instead of Python's exception.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call, ancestors
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.numbers import is_number, numbers_from_sizes
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.lazy_modules import lazy_module

aten = torch.ops.aten

_CPU = torch.device("cpu")

# What Python does with floats, as operators on tensors.
_ARITHMETIC: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    torch.sym_sqrt: aten.sqrt.default,
    math.sin: aten.sin.default,
    math.cos: aten.cos.default,
    math.tanh: aten.tanh.default,
    math.exp: aten.exp.default,
    math.log: aten.log.default,
}

# Python's choice of the second where it compares so to the first: of NaNs it is not torch's.
_CHOICES: Mapping[Any, Any] = {torch.sym_max: aten.gt.Tensor, torch.sym_min: aten.lt.Tensor}

# What makes a tensor of one number.
_FILLING = frozenset({aten.full.default, aten.full_like.default, aten.scalar_tensor.default})


def numbers_to_tensors(graph: PartitionedGraph) -> PartitionedGraph:
    """The graph with tensors for its numbers, but for sizes: inputs, saved values and what lies between.

    Raises:
        Unsupported: one of the limits above.
    """
    sizes = numbers_from_sizes(graph.forward)
    sizes |= _kept_with_data(graph.forward, sizes)
    if all(node in sizes for node in graph.forward.graph.nodes if is_number(node)):
        return graph
    forward, devices = _Rewriting(graph.forward, sizes, {}).run()
    backward = None
    if graph.backward is not None:
        saved_sizes = numbers_from_sizes(graph.backward, {node.name for node in sizes})
        saved_sizes |= _kept_with_data(graph.backward, saved_sizes)
        backward = _Rewriting(graph.backward, saved_sizes, devices).run()[0]
    return _tensors_first(replace(graph, forward=forward, backward=backward))


def _tensors_first(graph: PartitionedGraph) -> PartitionedGraph:
    """The graph with what is saved in its order again: numbers come last."""
    numbers = {node.name for node in graph.forward.graph.nodes if is_number(node)}
    saved = tuple(sorted(graph.saved, key=numbers.__contains__))
    if saved == graph.saved or graph.backward is None:
        return graph
    results = graph_results(graph.forward)
    computed = [node for node in results[graph.num_outputs :] if node is not None]
    given = (*results[: graph.num_outputs], *sorted(computed, key=is_number))
    graph.forward.graph.output_node().args = (given,)
    nodes = [*graph.backward.graph.nodes]
    places = {node.name: node for node in nodes[: len(saved)]}
    for name in saved:
        nodes[len(saved)].prepend(places[name])
    graph.forward.recompile()
    graph.backward.recompile()
    return replace(graph, saved=saved)


def _kept_with_data(module: GraphModule, sizes: set[Node]) -> set[Node]:
    """The numbers that have to do with integers out of data which operators take, as sizes for one: these operators run
    with torch's kernels, which take numbers (``many_sizes/region_around_data``).

    Raises:
        Unsupported: a float that the graph takes, or one that it saves, is among them.
    """
    of_data = [node for node in module.graph.nodes if is_number(node) and node not in sizes]
    waiting = [
        node
        for node in of_data
        if not isinstance(node.meta["val"], torch.SymFloat) and not all(map(is_number, node.users))
    ]
    kept: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in kept:
            continue
        kept.add(node)
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymFloat):
            raise _unsupported(node, "a float that the graph takes decides with data")
        waiting += [
            near for near in (*node.all_input_nodes, *node.users) if is_number(near) and near not in sizes
        ]
    return kept


def float_inputs(graph: PartitionedGraph) -> frozenset[int]:
    """Positions of the inputs that ``numbers_to_tensors`` makes tensors of."""
    examples = (node.meta["val"] for node in graph.forward.graph.find_nodes(op="placeholder"))
    return frozenset(k for k, example in enumerate(examples) if isinstance(example, torch.SymFloat))


def as_tensors(inputs: Sequence[Any], floats: frozenset[int]) -> tuple[Any, ...]:
    """Inputs with tensors for the floats at these positions, which take ever new values, as a learning rate does."""
    return tuple(
        torch.scalar_tensor(given, dtype=torch.float64) if k in floats else given
        for k, given in enumerate(inputs)
    )


class _Rewriting:
    """One module; ``devices`` has the devices of the numbers that it takes, by the names of their placeholders."""

    def __init__(self, module: GraphModule, sizes: set[Node], devices: Mapping[str, torch.device]) -> None:
        self._module = module
        self._sizes = sizes
        self._given = devices
        self._graph = Graph()
        self._made: dict[Node, Node] = {}
        self._devices: dict[Node, torch.device] = {}
        # By number, device and dtype.
        self._moved: dict[tuple[Node, torch.device], Node] = {}
        self._rounded: dict[tuple[Node, torch.device, torch.dtype], Node] = {}
        tensors = (node.meta.get("val") for node in module.graph.nodes)
        modes = (getattr(value, "fake_mode", None) for value in tensors)
        self._mode = next((mode for mode in modes if mode is not None), None) or FakeTensorMode()

    def _is_rewritten(self, node: Node) -> bool:
        return is_number(node) and node not in self._sizes

    def run(self) -> tuple[GraphModule, dict[str, torch.device]]:
        nodes = list(self._module.graph.nodes)
        for node in nodes:
            if self._is_rewritten(node):
                self._devices[node] = self._place(node)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        first, together = self._copied_together(nodes)
        for node in (*placeholders, *(node for node in nodes if node in first and node not in placeholders)):
            self._emit(node)
        for device, numbers in together.items():
            self._copy(numbers, device)
        for node in nodes:
            if node not in self._made:
                self._emit(node)
        return lazy_module(self._module, self._graph), {
            node.name: device for node, device in self._devices.items()
        }

    def _place(self, number: Node) -> torch.device:
        if number.op == "placeholder":
            return self._given.get(number.name, _CPU)
        if number.target is aten._local_scalar_dense.default:
            (tensor,) = number.all_input_nodes
            return tensor.meta["val"].device
        places = map(self._device_of, number.all_input_nodes)
        return next((place for place in places if place != _CPU), _CPU)

    def _copied_together(self, nodes: Sequence[Node]) -> tuple[set[Node], dict[torch.device, list[Node]]]:
        """For each device the numbers of the CPU that it reads and that can be had first of all; and what they need."""
        wanted: dict[torch.device, dict[Node, None]] = {}
        for node in nodes:
            for number in (
                filter(self._is_rewritten, node.all_input_nodes) if node.op == "call_function" else ()
            ):
                device = self._device_of(node)
                if device != self._devices[number] == _CPU:
                    wanted.setdefault(device, {})[number] = None
        first: set[Node] = set()
        together: dict[torch.device, list[Node]] = {}
        for device, numbers in wanted.items():
            for number in numbers:
                needed = ancestors([number])
                if all(self._device_of(node) == _CPU and not is_random(node) for node in needed):
                    together.setdefault(device, []).append(number)
                    first |= needed
        return first, together

    def _device_of(self, node: Node) -> torch.device:
        if is_number(node):
            return self._devices.get(node, _CPU)  # a size is wherever it is needed
        value = node.meta["val"]
        return value.device if isinstance(value, torch.Tensor) else value[0].device

    def _copy(self, numbers: Sequence[Node], device: torch.device) -> None:
        rows = [self._call(aten.view.default, self._made[number], [1]) for number in numbers]
        copied = self._call(aten._to_copy.default, self._call(aten.cat.default, rows), device=device)
        for position, number in enumerate(numbers):
            self._moved[number, device] = self._call(aten.select.int, copied, 0, position)

    def _emit(self, node: Node) -> None:
        if node.op == "output":
            self._graph.output(map_arg(node.args[0], self._made.__getitem__))
        elif not self._is_rewritten(node):
            self._made[node] = self._tensor_operator(node)
        elif node.op == "placeholder":
            made = self._made[node] = self._graph.node_copy(node)
            with self._mode:
                made.meta["val"] = torch.empty((), dtype=torch.float64, device=self._devices[node])
        else:
            self._made[node] = self._number(node)

    # -- numbers

    def _number(self, node: Node) -> Node:
        if node.target is aten._local_scalar_dense.default:
            (tensor,) = node.all_input_nodes
            if tensor.meta["val"].dtype is torch.bool:
                raise _unsupported(node, "a truth value out of a tensor")
            scalar = self._call(aten.view.default, self._made[tensor], [])
            return self._call(aten._to_copy.default, scalar, dtype=torch.float64)
        if node.target is torch.sym_float:
            (number,) = node.all_input_nodes
            return self._made[number]
        function = _ARITHMETIC.get(node.target, _CHOICES.get(node.target))
        if function is None or node.kwargs:
            raise _unsupported(node, f"{node.target} of numbers known only at run time")
        device = self._devices[node]
        operands = [self._operand(value, device) for value in node.args]
        if node.target in _CHOICES:
            first, second = operands
            return self._call(aten.where.self, self._call(function, second, first), second, first)
        return self._call(function, *operands)

    def _operand(self, value: Any, device: torch.device) -> Node:
        if isinstance(value, Node) and value in self._sizes:
            return self._call(aten.full.default, [], self._made[value], dtype=torch.float64, device=device)
        if isinstance(value, Node):
            return self._on(value, device)
        return self._call(aten.full.default, [], float(value), dtype=torch.float64, device=device)

    def _on(self, number: Node, device: torch.device) -> Node:
        if self._devices[number] == device:
            return self._made[number]
        found = self._moved.get((number, device))
        if found is None:
            found = self._call(aten._to_copy.default, self._made[number], device=device)
            self._moved[number, device] = found
        return found

    # -- operators on tensors

    def _tensor_operator(self, node: Node) -> Node:
        numbers = [source for source in node.all_input_nodes if self._is_rewritten(source)]
        if not numbers:
            return self._graph.node_copy(node, self._made.__getitem__)
        for number in numbers:
            if isinstance(number.meta["val"], torch.SymInt):
                raise _unsupported(node, "an operator takes an integer that is read out of a tensor")
        result = node.meta["val"]
        if not isinstance(result, torch.Tensor):
            raise _unsupported(node, f"{node.target} takes a number known only at run time")
        rounded = functools.partial(self._rounded_to, device=result.device, dtype=_dtype_for(node))
        if node.target in _FILLING and TensorSpec.of(result).is_contiguous:
            made = self._call(aten.expand.default, rounded(numbers[0]), self._shape_of(node))
            made = self._call(aten.clone.default, made, memory_format=torch.contiguous_format)
        elif "alpha" in node.kwargs and isinstance(node.kwargs["alpha"], Node):
            made = self._with_alpha(node, rounded)
        else:
            made = self._with_tensors(node, rounded)
        made.meta = dict(node.meta)
        return made

    def _shape_of(self, filling: Node) -> list[Any]:
        """The sizes that a result is filled to, as arguments."""
        given: Any = filling.args[0]
        if filling.target is aten.full.default:
            return list(map_arg(given, self._made.__getitem__))
        return [
            self._call(aten.sym_size.int, self._made[given], dim) if isinstance(size, torch.SymInt) else size
            for dim, size in enumerate(filling.meta["val"].shape)
        ]

    def _with_alpha(self, node: Node, rounded: Callable[[Node], Node]) -> Node:
        left, right = node.args[:2]
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or not isinstance(right, Node):
            raise _unsupported(node, f"{node.target} takes a number known only at run time")
        scaled = self._call(aten.mul.Tensor, self._made[right], rounded(node.kwargs["alpha"]))  # type: ignore
        return self._graph.call_function(node.target, (self._made[left], scaled))  # type: ignore

    def _with_tensors(self, node: Node, rounded: Callable[[Node], Node]) -> Node:
        """The call of the overload that takes tensors where this one takes numbers."""
        target: Any = node.target
        places = [
            k for k, value in enumerate(node.args) if isinstance(value, Node) and self._is_rewritten(value)
        ]
        if len(places) != sum(self._is_rewritten(source) for source in _occurrences(node)):
            raise _unsupported(node, f"{target} takes a number known only at run time")
        overload = _overload_for_tensors(target, tuple(places))
        if overload is None:
            raise _unsupported(node, f"{target} takes a number known only at run time")
        args = list(
            map_arg(node.args, lambda read: rounded(read) if self._is_rewritten(read) else self._made[read])
        )
        for k in _tensor_arguments(overload):
            if k < len(args) and isinstance(args[k], (int, float)) and overload is not target:
                dtype, device = _dtype_for(node), node.meta["val"].device
                args[k] = self._call(aten.full.default, [], args[k], dtype=dtype, device=device)
        return self._graph.call_function(overload, tuple(args), dict(node.kwargs))

    def _rounded_to(self, number: Node, *, device: torch.device, dtype: torch.dtype) -> Node:
        key = (number, device, dtype)
        if key not in self._rounded:
            here = self._on(number, device)
            self._rounded[key] = (
                here if dtype is torch.float64 else self._call(aten._to_copy.default, here, dtype=dtype)
            )
        return self._rounded[key]

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Node:
        with self._mode, torch.no_grad():
            return add_call(self._graph, None, function, *args, **kwargs)


def _dtype_for(node: Node) -> torch.dtype:
    """In which dtype an operator computes with a number: eager's kernels do not round it to 16 bits."""
    result = node.meta["val"]
    dtype = result.dtype
    if dtype is torch.bool:
        tensors = [read.meta["val"] for read in node.all_input_nodes if not is_number(read)]
        dtype = torch.result_type(tensors[0], 1.0) if tensors else torch.float64
    if not (dtype.is_floating_point or dtype.is_complex):
        raise _unsupported(node, f"{node.target} makes {dtype} of a float known only at run time")
    if dtype.is_complex:
        return dtype.to_real()
    return torch.float32 if dtype.itemsize == 2 and result.dim() else dtype


@functools.cache
def _overload_for_tensors(target: Any, places: tuple[int, ...]) -> Any:
    """The overload of an operator that takes tensors at these places and is the same otherwise."""
    schema = target._schema
    candidates = [
        target,
        *(getattr(target.overloadpacket, name) for name in target.overloadpacket.overloads()),
    ]
    for overload in candidates:
        arguments = overload._schema.arguments
        if len(arguments) < len(schema.arguments) or any(argument.is_out for argument in arguments):
            continue
        same = all(
            _is_tensor(theirs) if k in places else _is_tensor(theirs) or str(theirs.type) == str(ours.type)
            for k, (ours, theirs) in enumerate(zip(schema.arguments, arguments, strict=False))
        )
        names = [argument.name for argument in arguments]
        if same and all(argument.name in names for argument in schema.arguments if argument.kwarg_only):
            return overload
    return None


def _tensor_arguments(overload: Any) -> Iterable[int]:
    return (k for k, argument in enumerate(overload._schema.arguments) if _is_tensor(argument))


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _occurrences(node: Node) -> list[Node]:
    """What a node reads, as often as it does."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _unsupported(node: Node, explanation: str) -> Unsupported:
    return Unsupported("number-from-data", f"{explanation} ({node.name})")
