"""Begins and ends the rounds of one ``DistributedDataParallel`` module, and is the communicator of its programs.

Gradients come on two ways. A compiled backward stores them at their places in the buckets and says so. All others are
accumulated by autograd's engine as usual, and copied into the buckets then: those of parameters that eager code between
compiled graphs uses, that have hooks, or that are used outside of the module, as by weight decay written into the loss.

A round begins when a backward reaches a result of the module, or when its first gradient comes. As in stock DDP, a
backward whose forward did not go through the module is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import filterfalse
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.communicator import Destinations, WantedValues
from gradsplit.compile_core.torch_facts.autograd_engine import (
    call_after_backward,
    current_autograd_node,
    current_graph_task_id,
    will_engine_execute_node,
)
from gradsplit.distributed.gradients.accumulation_nodes import AccumulationNodes
from gradsplit.distributed.gradients.anchors import Anchors
from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.gradients.paths_of_backward import reached_by_some
from gradsplit.distributed.gradients.requested_gradients import (
    not_requested,
    returns_values,
    wanted_values,
    watch_anchors,
)
from gradsplit.distributed.gradients.round import Round
from gradsplit.distributed.gradients.rounds_of_backward import round_begins, round_ended


class DDPCommunicator:
    """See ``gradsplit.compile_core.ir.communicator``.

    Args:
        buckets: those of the module; an attribute, too.
        before_round: is called before any gradient of a round has come.

    Attributes:
        expecting: a forward of the module ran whose backward has not ended yet.
        missing: the parameters that got no gradient on this rank in the rounds since the last forward.
        rounds: how many have ended.
    """

    def __init__(self, buckets: Buckets, before_round: Callable[[], None] = lambda: None) -> None:
        self.buckets = buckets
        self._before_round = before_round
        self._nodes = AccumulationNodes(buckets.parameters, self._reaches_parameter, self._accumulated)
        self._anchors = Anchors(buckets.parameters, self._nodes)
        watch_anchors(self._anchors)
        # The nodes of programs in autograd's graph, as long as that lives, and which gradients each stores.
        self._programs: WeakKeyDictionary[Any, Sequence[str]] = WeakKeyDictionary()
        self.expecting = False
        # Whether results of the last forward have nodes, whose hooks show which backwards are the module's.
        self._has_result_nodes = False
        # Parameters that have got no gradient since the last forward.
        self._awaited: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()
        self.rounds = 0
        self._round: Round | None = None
        # One that broke off, until its averages are waited for.
        self._broken: Round | None = None

    def hooked(self) -> frozenset[str]:
        """The names of parameters that have hooks of the program's."""
        return self._nodes.hooked()

    def refuse_changed(self) -> None:
        """
        Raises:
            CompileError: the gradient of a parameter, as that is now, has no place in the buckets.
        """
        if (buffers := self.buckets.buffers) is not None:
            if self._round is None:
                buffers.restore_places()
            buffers.refuse_changed(self.buckets.parameters)

    def adopt(self, plan: BucketPlan) -> None:
        """See ``Buckets``.

        Raises:
            InternalError: a backward is under way.
        """
        if self._round is not None:
            raise InternalError("bucket plans cannot change during a backward")
        self.buckets.adopt(plan)

    def begin_forward(self) -> None:
        """A call of the module begins: what an unfinished backward has left is cleared away."""
        if current_graph_task_id() == -1:
            self.break_off()
            self._await_broken()
        if self.buckets.stepper is not None and self._round is None:
            self.buckets.stepper.begin_forward()

    def expect_backward(self, result: Any) -> None:
        """A synchronised call of the module ended: the backward that reaches its result is a round.

        A round must begin in the backward that the program asked for, or it would end with the first of those that
        reentrant checkpoints run inside of it.
        """
        self.expecting = True
        self._awaited = tuple(self.buckets.parameters)
        results = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        nodes = {value.grad_fn for value in results if value.grad_fn is not None}
        self._has_result_nodes = bool(nodes)
        for node in nodes:
            node.register_prehook(self._reaches_result)
        if self.buckets.stepper is not None:
            self.buckets.stepper.expect_backward(is_noticed=self._has_result_nodes)

    def break_off(self) -> None:
        """The backward of the round raised. Its averages are waited for later: where other ranks do not start them,
        that would hide the exception."""
        if self._round is not None:
            self._round.break_off()
            self._broken, self._round = self._round, None
            round_ended(self)

    def anchor(self, names: Sequence[str]) -> torch.Tensor:
        return self._anchors.of_program(names)

    def expect(self, node: Any, names: Sequence[str]) -> None:
        self._programs[node] = names

    def wanted_values(self, names: Sequence[str]) -> WantedValues:
        return wanted_values(self.buckets.parameters, names)

    def begin(self, node: Any, undefined: Mapping[str, Collection[int]]) -> Destinations:
        buckets, static = self.buckets, self.buckets.static_graph
        if not self._programs_store():
            return ProgramRun(buckets, None)
        # To stock DDP, too, a gradient that a function drops is zeros, and one to which no path leads is missing.
        zeros = reached_by_some(node, undefined) if undefined else frozenset()
        missing = frozenset(undefined) - zeros | not_requested(buckets.parameters)
        if static is not None:
            missing |= static.left_unused(zeros)
        run = ProgramRun(buckets, self._round or self._open_round(), missing, zeros - missing)
        if buckets.stepper is not None:
            buckets.stepper.program_begins()
        return run

    def _reaches_result(self, *_: Any) -> None:
        """Before the engine runs the node of a result of the module: every such backward is a round, on all ranks."""
        self._open_round_if_none()
        if self.buckets.stepper is not None:
            self.buckets.stepper.module_reached()

    def _reaches_parameter(self, *_: Any) -> None:
        """Before the engine accumulates a gradient."""
        if self.expecting:
            self._open_round_if_none()

    def _accumulated(self, name: str, *_: Any) -> None:
        """The engine has accumulated a gradient."""
        if self._round is not None:
            self._round.accumulated(name)

    def _programs_store(self) -> bool:
        """Whether programs store gradients in the backward that runs: not where it is for gradients of inputs only."""
        return not returns_values() and self._anchors.are_reached()

    def _open_round_if_none(self) -> None:
        if self._round is None and self.buckets.buffers is not None and not returns_values():
            self._open_round()

    def _open_round(self) -> Round:
        assert self.buckets.buffers is not None
        self._await_broken()
        self._before_round()
        self.buckets.buffers.restore_places()
        announced = Counter[str]()
        if self._programs_store():
            current = current_autograd_node()
            for node, names in [*self._programs.items()]:
                if node is current or will_engine_execute_node(node):
                    announced.update(names)
        round_ = Round(self.buckets, self._nodes, announced)
        round_begins(self, round_)
        self._round = round_
        call_after_backward(self._end_round)
        round_.begin()
        return round_

    def _end_round(self) -> None:
        ended = self._round
        assert ended is not None
        if ended.end():
            got = ended.stored | ended.unused
            self.missing = self._awaited = tuple(filterfalse(got.__contains__, self._awaited))
            # As stock DDP, a forward may be followed by several backwards, each for some of the parameters. Where
            # results have nodes, other backwards are not the module's: ranks may be missing different ones.
            self.expecting = bool(self.missing) and not self._has_result_nodes
            self.rounds += 1
        self._round = None
        round_ended(self)

    def _await_broken(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            for work in broken.works:
                self.buckets.wait(work)
            if self.buckets.stepper is not None:
                self.buckets.stepper.abandon_round()


class ProgramRun:
    """Of a program in a round.

    Args:
        round_: ``None`` where the backward is for gradients of inputs only: what the program stores is dropped.
        missing: gradients to which nothing comes, whatever the program stores.
        zeros: those that count as zeros.
    """

    def __init__(
        self,
        buckets: Buckets,
        round_: Round | None,
        missing: frozenset[str] = frozenset(),
        zeros: frozenset[str] = frozenset(),
    ) -> None:
        self._buckets, self._round = buckets, round_
        self._missing, self._zeros = missing, zeros
        # What does not go to its place.
        self._scratch: dict[str, torch.Tensor] = {}

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        return None if self._round is None else self._round.places(names)

    def destinations(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        if (places := self.usual_places(names)) is not None:
            return places
        self._scratch = {name: self._buckets.empty_gradient(name) for name in names}
        return [*self._scratch.values()]

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        scratch, self._scratch = self._scratch, {}
        if self._round is None:
            return
        zeros = self._zeros.intersection(names) - self._round.stored
        for name, contribution in scratch.items():
            if name not in self._missing and name not in self._zeros:
                self._round.add_stored(name, contribution)
        self._round.programs_stored(names, self._missing, zeros)
        if self._buckets.stepper is not None:
            self._buckets.stepper.region_ended(values)
