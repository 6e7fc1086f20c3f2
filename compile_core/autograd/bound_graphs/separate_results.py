"""Results of one graph from which a backward goes on only to the inputs that each was computed from.

The engine decides before a backward what it comes to, by the edges of autograd's graph alone. Were a graph with several
results one node there, a backward through one of them would go through the history of what only the others read: with
nothing, which not every derivative and hook takes, and the saved values there would be unpacked and freed.

So where it matters the node of the call stays out of the engine's graph. Each result has a node, which notes the
gradient that arrives, and so has each group of inputs whose gradients depend on the same results. The first node of
inputs that runs calls the node of the call. The nodes of results were made later than those of inputs, so that the
engine prefers them; only other threads, which it has for other devices, may still bring gradients then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.apart_from_torch_compile import apart_from_torch_compile
from gradsplit.compile_core.torch_facts.autograd_engine import (
    current_graph_task_id,
    graph_task_keeps_graph,
    will_engine_execute_node,
)


@dataclass(frozen=True)
class SeparateResults:
    """Which inputs belong to which results.

    Attributes:
        results: positions of the results that take gradients, among the graph's outputs.
        groups: sets of those, each with the positions of the inputs whose gradients depend on these very results.
        of_few: the inputs that do not depend on all.
        get_zeros: whether custom functions get zeros where the engine comes to a result with nothing.
        own_nodes: whether the results have nodes of their own whatever the inputs: torch fails an assertion where a
            result of a node but its first retains its gradient and is then changed in place.
    """

    results: tuple[int, ...]
    groups: tuple[tuple[frozenset[int], tuple[int, ...]], ...]
    of_few: tuple[int, ...]
    get_zeros: bool
    own_nodes: bool

    @staticmethod
    def of(
        results: tuple[int, ...],
        results_of_inputs: dict[int, frozenset[int]],
        *,
        get_zeros: bool,
        own_nodes: bool,
    ) -> SeparateResults | None:
        """``None`` if it cannot matter, or a result leads to no input."""
        every = frozenset(results)
        of_few = tuple(k for k, of in results_of_inputs.items() if of and of != every)
        groups: dict[frozenset[int], list[int]] = {}
        for position, of in results_of_inputs.items():
            if of:
                groups.setdefault(of, []).append(position)
        if not (of_few or get_zeros or own_nodes) or frozenset().union(*groups) != every:
            return None
        return SeparateResults(
            results,
            tuple((of, tuple(positions)) for of, positions in groups.items()),
            of_few,
            get_zeros,
            own_nodes,
        )

    def matter_for(self, primals: Sequence[Any]) -> bool:
        return self.get_zeros or self.own_nodes or any(primals[k].grad_fn is not None for k in self.of_few)

    def separate(self, outputs: Sequence[Any], primals: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the node of the call, as results of nodes of their own."""
        first = outputs[self.results[0]]
        # A node of torch's own keeps the call's alive: up to torch 2.11 holding that in Python does not.
        call = _SeparateCall(first.grad_fn, first.view_as(first).grad_fn, len(outputs))
        links = [
            (of, _link(call, of, positions, first.device, *[primals[k] for k in positions]))
            for of, positions in self.groups
        ]
        separate = [*outputs]
        for k in self.results:
            # In a tuple, so that no edge leads to the node of the call.
            separate[k] = _separate(call, k, (outputs[k],), *(link for of, link in links if k in of))
        return tuple(separate)


@dataclass
class _Round:
    """One backward that has come to the call.

    Attributes:
        arrived: the gradients of results, and that none came.
        found: what the node of the call returned and no node of inputs has taken; empty before.
        known: the results of which it was told what arrived.
        nodes: how many nodes of inputs are still to run.
        kept: what the call kept for other backwards, while it keeps everything for this one.
    """

    arrived: dict[int, torch.Tensor | None] = field(default_factory=dict)
    found: list[torch.Tensor | None] = field(default_factory=list)
    known: frozenset[int] = frozenset()
    nodes: int = 0
    kept: tuple[Any] | None = None


class _Everything:
    """All that a call has saved, for gradients that arrive late; see ``KeptValues``."""

    def __init__(self, saved: Sequence[torch.Tensor]) -> None:
        self.saved = saved

    def take(self, absent: int, keep_graph: bool) -> list[torch.Tensor]:
        return [*self.saved]


class _SeparateCall:
    def __init__(self, node: Any, owner: Any, count: int) -> None:
        self.node, self.owner = node, owner
        self.count = count
        self.nodes_of_results: dict[int, weakref.ref[Any]] = {}
        self.nodes_of_inputs: list[weakref.ref[Any]] = []
        self.rounds: dict[int, _Round] = {}
        self.lock = threading.RLock()

    def arrive(self, result: int, gradient: torch.Tensor | None) -> None:
        with self.lock:
            self.rounds.setdefault(current_graph_task_id(), _Round()).arrived[result] = gradient

    def gradients(self, of: frozenset[int], positions: tuple[int, ...]) -> list[torch.Tensor | None]:
        """Of the inputs at these positions, which depend on these results."""
        number = current_graph_task_id()
        with self.lock:
            round = self.rounds[number]
            if not round.nodes:
                round.nodes = sum(map(_runs, self.nodes_of_inputs))
            reached = frozenset(round.arrived)
            if not of & reached <= round.known:
                self._run(round, reached)
            found: list[torch.Tensor | None] = [None] * len(positions)
            for place, k in enumerate(positions):
                # The first gradient is that of the program itself. Autograd copies what others hold, too.
                found[place], round.found[1 + k] = round.found[1 + k], None
            round.nodes -= 1
            if not round.nodes:
                del self.rounds[number]
                if round.kept is not None:
                    (self.node.kept,) = round.kept
        return found

    def _run(self, round: _Round, reached: frozenset[int]) -> None:
        everything = None
        if any(_runs(node) for k, node in self.nodes_of_results.items() if k not in round.arrived):
            everything = self._everything()
        self.node.reached = reached
        round.found = [*self.node.apply(*map(round.arrived.get, range(self.count)))]
        round.known = reached
        if everything is not None:
            round.kept = (getattr(self.node, "kept", None),)
            self.node.kept = everything

    def _everything(self) -> _Everything | None:
        """What is needed to run again, where the node of the call will give it up."""
        if graph_task_keeps_graph():
            return None
        try:
            return _Everything(self.node.saved_tensors)
        except RuntimeError:  # Some of it has been freed or changed, which the node of the call looks into.
            return None


def _runs(node: weakref.ref[Any]) -> bool:
    alive = node()
    return alive is not None and will_engine_execute_node(alive)


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _SeparateCall,
        of: frozenset[int],
        positions: tuple[int, ...],
        device: torch.device,
        *inputs: Any,
    ) -> torch.Tensor:
        ctx.call, ctx.of, ctx.positions = call, of, positions
        ctx.set_materialize_grads(False)
        call.nodes_of_inputs.append(weakref.ref(ctx))
        return torch.empty(0, device=device)

    @staticmethod
    @apart_from_torch_compile
    def backward(ctx: Any, _: torch.Tensor | None) -> Any:
        return (None, None, None, None, *ctx.call.gradients(ctx.of, ctx.positions))


class _SeparateResult(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _SeparateCall, result: int, output: tuple[torch.Tensor], *links: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.result = call, result
        # Where a gradient lies decides on which thread the engine goes on with it.
        ctx.nothing = (links[0].detach(),) * len(links)
        ctx.set_materialize_grads(False)
        call.nodes_of_results[result] = weakref.ref(ctx)
        return output[0].detach()

    @staticmethod
    @apart_from_torch_compile
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        ctx.call.arrive(ctx.result, gradient)
        return (None, None, None, *ctx.nothing)


# See ``_apply`` of the node of the call.
_link: Any = super(torch.autograd.Function, _Inputs).apply  # type: ignore[attr-defined]
_separate: Any = super(torch.autograd.Function, _SeparateResult).apply  # type: ignore[attr-defined]
