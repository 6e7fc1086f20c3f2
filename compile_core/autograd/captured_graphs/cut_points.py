"""Where a captured graph can be cut so that its pieces, each traced by itself, do what the whole does.

One run on fake tensors shows it, without functionalization, so that sharing is visible as shared storage and a change
in place as a version. Between two nodes there may be a cut unless

- memory that was used before it is changed after it: a piece may have saved it for its backward, or know it under two
  names;
- a mode other than autocast is not what it was at the beginning;
- gradients are asked for later: autograd finds no values of a piece between its results;
- what passes is neither a tensor nor a number that sizes determine (``pieces.is_passable``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.autograd.captured_graphs.calling_convention import (
    as_intermediate,
    failures_explained,
)
from gradsplit.compile_core.autograd.captured_graphs.pieces import is_passable, is_sequence_of_tensors
from gradsplit.compile_core.autograd.captured_graphs.preserved_modes import preserved_modes
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.torch_facts.fake_tensors import fake_mode_of, run_on_fakes
from gradsplit.compile_core.torch_facts.thread_state import enter_autocast
from gradsplit.compile_core.torch_facts.torch_switches import read_switches


@dataclass(frozen=True)
class CutPoints:
    """What a run of a graph showed.

    Attributes:
        nodes: those that call something, in order.
        allowed: for each of them, whether a piece may begin with it.
        values: what every node held at the end.
        changed_at: for a tensor that the graph changes in place, the position of the last node in ``nodes`` that does.
        reshaped_at: for a tensor that the graph gives another shape, likewise.
    """

    nodes: tuple[Node, ...]
    allowed: tuple[bool, ...]
    values: Mapping[Node, Any]
    changed_at: Mapping[Node, int]
    reshaped_at: Mapping[Node, int]

    def needs_gradient(self, node: Node) -> bool:
        """Whether autograd has something to do for it."""
        return any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(self.values[node])
        )

    def places(self, begins: Iterable[int]) -> dict[Node, int]:
        """The piece of each node, where pieces begin at these positions beside the first."""
        starts = set(begins)
        place_of: dict[Node, int] = {}
        place = 0
        for position, node in enumerate(self.nodes):
            place += position in starts
            # Items stay with the operation that has several results.
            whole: Any = node.args[0] if node.target is operator.getitem else None
            is_item = whole in place_of and is_sequence_of_tensors(self.values[whole])
            place_of[node] = place_of[whole] if is_item else place
        return place_of

    def examples(self, place_of: Mapping[Node, int], examples: Sequence[Any]) -> Callable[[Node, int], Any]:
        """What a piece's inputs look like, by node and the piece's place: as ``values``, but for the whole graph's
        inputs until they are changed.

        Raises:
            Unsupported: an input gets another shape by its change, and is used in a piece beside that which changes it.
        """
        placeholders = [node for node in self.values if node.op == "placeholder"]
        given = dict(zip(placeholders, examples, strict=True))
        for node in placeholders:
            at = self.changed_at.get(node)
            if at is None or _kind(self.values[node])[:2] == _kind(given[node])[:2]:
                continue
            if any(place_of.get(user, 0) != place_of[self.nodes[at]] for user in node.users):
                raise Unsupported("cut", f"{node} gets another shape in a program that is cut")

        def example(node: Node, place: int) -> Any:
            at = self.changed_at.get(node)
            is_as_given = node in given and (at is None or place <= place_of[self.nodes[at]])
            return given[node] if is_as_given else self.values[node]

        return example


def find_cut_points(module: GraphModule, examples: Sequence[Any]) -> CutPoints:
    """Runs ``module`` once on fresh fake tensors like ``examples``, and on the numbers among them.

    Raises:
        Unsupported: an input has another layout than a strided one, or the graph does not run on fake tensors.
    """
    fakes = [example for example in examples if isinstance(example, FakeTensor)]
    if any(example.layout is not torch.strided for example in fakes):
        raise Unsupported("layout", "an input is no strided tensor")
    fake_mode = fake_mode_of(examples) or FakeTensorMode()
    with preserved_modes(), run_on_fakes(fake_mode):
        with torch.enable_grad():
            inputs = [
                as_intermediate(example) if isinstance(example, torch.Tensor) else example
                for example in examples
            ]
        run = _Run(module, inputs)
        with failures_explained():
            run.run_all()
    return run.finish()


class _Run:
    """A run of a graph, node by node, with what is seen of it."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        self._module = module
        placeholders = module.graph.find_nodes(op="placeholder")
        self._values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        self._nodes = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
        self._positions = {node: position for position, node in enumerate(self._nodes)}
        # By storage: the first node that had to do with it, and the last that changed it.
        self._used: dict[int, int] = {}
        self._changed: dict[int, int] = {}
        # By the tensor's ``id``.
        self._reshaped: dict[int, int] = {}
        self._forbidden: set[int] = set()

    def run_all(self) -> None:
        modes = _modes()
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                self._values[node] = functools.reduce(getattr, node.target.split("."), self._module)
            elif node in self._positions:
                position = self._positions[node]
                if _modes() != modes:
                    self._forbidden.add(position)
                self._run(node, position)

    def finish(self) -> CutPoints:
        for storage, last in self._changed.items():
            self._forbidden.update(range(self._used[storage] + 1, last + 1))
        for position, node in enumerate(self._nodes):
            self._forbidden.update(range(position + 1, self._last_direct_use(node) + 1))
            if node.target is torch.autograd.grad:
                self._forbidden.update(range(position + 1))
        allowed = tuple(position not in self._forbidden for position in range(len(self._nodes)))
        changed_at = {
            node: self._changed[storage]
            for node, value in self._values.items()
            if isinstance(value, torch.Tensor)
            for storage in _storages(value)
            if storage in self._changed
        }
        reshaped_at = {
            node: self._reshaped[id(value)]
            for node, value in self._values.items()
            if id(value) in self._reshaped
        }
        return CutPoints(tuple(self._nodes), allowed, self._values, changed_at, reshaped_at)

    def _run(self, node: Node, position: int) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = [_state(tensor) for tensor in taken]
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        self._values[node] = value
        for storage in _storages((taken, value)):
            self._used.setdefault(storage, position)
        for tensor, state in zip(taken, before, strict=True):
            if _state(tensor) == state:
                continue
            self._changed.update(dict.fromkeys(_storages(tensor), position))
            if _kind(tensor)[:2] != state[1][:2]:
                self._reshaped[id(tensor)] = position

    def _last_direct_use(self, node: Node) -> int:
        """The last node that needs this one's value beside it: of no matter where it can be passed."""
        value = self._values[node]
        if is_passable(value) or node.target is enter_autocast:
            return -1
        users: Iterable[Node] = node.users
        if is_sequence_of_tensors(value):
            users = [user for user in users if user.target is not operator.getitem]
        return max((self._positions.get(user, -1) for user in users), default=-1)


def _modes() -> tuple[object, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), read_switches()


def _state(tensor: torch.Tensor) -> tuple[object, tuple[object, ...]]:
    """What shows that a tensor was changed in place; sizes are compared as they are printed, which asks nothing."""
    return None if tensor.is_inference() else tensor._version, _kind(tensor)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return str(tuple(tensor.shape)), str(tensor.stride()), tensor.requires_grad


def _storages(value: Any) -> list[int]:
    return [
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
