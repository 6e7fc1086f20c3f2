"""What must be known of an exported graph before it is cut: its values, seen by running it on fake tensors.

A cut between two nodes sends every value across that is made before it and read after it. Not every cut will do: what
is changed in place must be changed where it is made, a buffer that is written lives in one stage, and modes of the
program such as autocast do not reach from one stage into the next.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.export.conditions import compile_condition
from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.export.structures import build
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes
from gradsplit.compile_core.torch_facts.symbolic_numbers import memory_order, value_at_compilation
from gradsplit.compile_core.torch_facts.thread_state import set_grad_enabled
from gradsplit.distributed.pipeline.draws import Draw, RecordDraws
from gradsplit.distributed.pipeline.symbolic_inputs import SizedInput, SymbolicInputs

_MODES = ("_enter_autocast", "_exit_autocast")


@dataclass(frozen=True)
class GraphFacts:
    """An exported graph, examined.

    Attributes:
        nodes: those that compute, in order. A cut at position ``k`` lies before ``nodes[k]``.
        values: what each node and placeholder is, as a fake tensor, or something else.
        symbols: of the open sizes in it.
        constant: nodes that follow from sizes, and from buffers and constants that nobody writes, alone: each stage
            computes them anew.
        cuts: positions at which the graph can be cut.
        forbidden: why not, by position.
        draws: of random numbers, by node.
        writes: nodes that change a tensor in place.
    """

    nodes: tuple[fx.Node, ...]
    values: Mapping[fx.Node, Any]
    symbols: SymbolicInputs
    constant: frozenset[fx.Node]
    cuts: tuple[int, ...]
    forbidden: Mapping[int, str]
    draws: Mapping[fx.Node, list[Draw]]
    writes: frozenset[fx.Node]

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values[node], torch.Tensor)

    def is_number(self, node: fx.Node) -> bool:
        return _is_number(self.values[node])

    def requires_grad(self, node: fx.Node) -> bool:
        return self.is_tensor(node) and self.values[node].requires_grad

    def bytes_of(self, node: fx.Node) -> int:
        """In the call that was exported."""
        leaves = [leaf for leaf in tree_leaves(self.values[node]) if isinstance(leaf, torch.Tensor)]
        return sum(value_at_compilation(leaf.numel() * leaf.itemsize) for leaf in leaves)


class _Watching(fx.Interpreter):
    """Runs a graph and notes which memory each node writes, and what it draws."""

    def __init__(self, graph: fx.Graph, symbols: SymbolicInputs) -> None:
        super().__init__(fx.GraphModule({}, graph), garbage_collect_values=False)
        self.symbols = symbols
        self.writes: dict[fx.Node, set[int]] = {}
        self.draws: dict[fx.Node, list[Draw]] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = [
            value
            for source in n.all_input_nodes
            for value in tree_leaves(self.env[source])
            if isinstance(value, torch.Tensor)
        ]
        before = [tensor._version for tensor in given]
        with RecordDraws(self.symbols.text) as recording:
            result = super().run_node(n)
        if recording.found:
            self.draws[n] = recording.found
        changed = {
            _memory(tensor)
            for tensor, version in zip(given, before, strict=True)
            if tensor._version != version
        }
        if changed:
            self.writes[n] = changed
        return result


def examine(exported: Exported) -> GraphFacts:
    """Runs the graph on fake tensors of the exported call's sizes, with symbols for those that are open."""
    placeholders = exported.graph.find_nodes(op="placeholder")
    symbols, inputs = fakes_of(exported)
    watching = _Watching(exported.graph, symbols)
    with run_on_fakes(symbols.mode), torch.enable_grad():
        watching.run(*inputs)
    nodes = tuple(node for node in exported.graph.nodes if node.op not in ("placeholder", "output"))
    values = {node: watching.env[node] for node in (*placeholders, *nodes)}
    constant = _constants(nodes, values, watching)
    forbidden = _forbidden_cuts(nodes, values, watching.writes, constant)
    cuts = tuple(k for k in range(1, len(nodes)) if k not in forbidden)
    return GraphFacts(
        nodes, values, symbols, constant, cuts, forbidden, watching.draws, frozenset(watching.writes)
    )


def fakes_of(exported: Exported) -> tuple[SymbolicInputs, list[torch.Tensor]]:
    """Fake tensors for the graph's placeholders, and the symbols in them."""
    device = torch.device(exported.device)
    sized = {k: SizedInput.of_argument(given, device) for k, given in enumerate(exported.arguments)}
    held = {
        name: replace(SizedInput.of(tensor, name), device=device if tensor.is_meta else tensor.device)
        for name, tensor in exported.tensors.items()
    }
    symbols = SymbolicInputs([*sized.values(), *held.values()])
    symbols.mode.allow_non_fake_inputs = True
    made = dict(zip([*sized, *held], symbols.fakes, strict=True))
    args, kwargs = build(exported.call, symbols.fakes)
    for text in exported.conditions:
        # What holds of all calls is known from here on, and no question of the graph's.
        bool(compile_condition(text)(args, kwargs))
    return symbols, [made[node.meta["path"]] for node in exported.graph.find_nodes(op="placeholder")]


def is_part(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a node takes one item of what another returns; it stays with that one."""
    return node.target is operator.getitem and not isinstance(values[node.all_input_nodes[0]], torch.Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, *SYMBOLIC_NUMBERS))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _constants(
    nodes: tuple[fx.Node, ...], values: Mapping[fx.Node, Any], watching: _Watching
) -> frozenset[fx.Node]:
    written = set().union(*watching.writes.values())
    found: set[fx.Node] = set()
    for node in nodes:
        memories = {_memory(leaf) for leaf in tree_leaves(values[node]) if isinstance(leaf, torch.Tensor)}
        # Of arguments no graph reads numbers but their sizes.
        kinds = ("buffer", "constant", "argument") if _is_number(values[node]) else ("buffer", "constant")
        sources = all(source in found or source.meta.get("kind") in kinds for source in node.all_input_nodes)
        is_mode = node.target is set_grad_enabled or getattr(node.target, "__name__", "") in _MODES
        reads_written = any(
            _memory(leaf) in written
            for source in node.all_input_nodes
            for leaf in tree_leaves(values[source])
            if isinstance(leaf, torch.Tensor)
        )
        if sources and not (is_mode or reads_written or memories & written or node in watching.draws):
            found.add(node)
    return frozenset(found)


def _forbidden_cuts(
    nodes: tuple[fx.Node, ...],
    values: Mapping[fx.Node, Any],
    writes: Mapping[fx.Node, set[int]],
    constant: frozenset[fx.Node],
) -> dict[int, str]:
    forbidden: dict[int, str] = {}

    def forbid(first: int, last: int, why: str) -> None:
        """Cuts after ``nodes[first]`` and before ``nodes[last]``."""
        for position in range(first + 1, last + 1):
            forbidden.setdefault(position, why)

    place = {node: position for position, node in enumerate(nodes)}
    written = set().union(*writes.values())
    accesses: dict[int, list[int]] = {}
    last_write: dict[int, int] = {}
    of_input = {
        _memory(value) for node, value in values.items() if node.op == "placeholder" and node not in place
    }
    for position, node in enumerate(nodes):
        touched = [node, *node.all_input_nodes]
        for memory in {
            _memory(leaf)
            for one in touched
            for leaf in tree_leaves(values[one])
            if isinstance(leaf, torch.Tensor)
        } & written:
            accesses.setdefault(memory, []).append(position)
        for memory in writes.get(node, ()):
            last_write[memory] = position
    for memory, positions in accesses.items():
        # Of a buffer or an argument what is read later must be what was written, too.
        last = positions[-1] if memory in of_input else last_write[memory]
        forbid(positions[0], last, "a tensor is changed in place across it")
    grad_off: int | None = None
    open_modes: list[int] = []
    for position, node in enumerate(nodes):
        name = getattr(node.target, "__name__", "")
        if node.target is set_grad_enabled:
            if node.args[0] is False:
                grad_off = position if grad_off is None else grad_off
            elif grad_off is not None:
                forbid(grad_off, position, "it lies in a no_grad block")
                grad_off = None
        elif name == _MODES[0]:
            open_modes.append(position)
        elif name == _MODES[1] and open_modes:
            forbid(open_modes.pop(), position, "it lies in an autocast block")
        if node in constant or (isinstance(values[node], torch.Tensor) and is_dense(values[node])):
            continue
        # Kernels round otherwise where a tensor lies otherwise, so what has gaps is not sent.
        why = "what crosses it " + (
            "has gaps in memory" if isinstance(values[node], torch.Tensor) else "is no tensor"
        )
        for user in node.users:
            if user.op != "output" and not is_part(user, values):
                forbid(position, place[user], why)
    return forbidden


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in some order of dims, whatever the open sizes are."""
    order, _ = memory_order(tensor.stride())
    expected: Any = 1
    for dim in reversed(order):
        size = tensor.shape[dim]
        if not (statically_known_true(size == 1) or statically_known_true(tensor.stride(dim) == expected)):
            return any(statically_known_true(size == 0) for size in tensor.shape)
        expected *= size
    return True
