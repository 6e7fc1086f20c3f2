"""Gradients come in, are averaged over ranks bucket by bucket, and become ``param.grad``.

They come on two ways. A compiled backward stores its gradients at their places in the buckets and says so: this class
is its communicator. All others are accumulated by autograd's engine as usual, and copied into the buckets then: those
of parameters that eager code between compiled graphs uses, that have hooks, or that are used outside of the module,
as by weight decay written into the loss.

A *round* is one backward. When it reaches a result of the module, or when its first gradient comes, the engine is asked
what it is going to run, so it is known how many contributions each gradient will get; a bucket is started when the last
one has come to its last gradient. At the end of the backward what is left is started, everything is awaited, and
gradients are set. So each backward reduces each bucket once, in the plan's order, whichever way this rank's gradients
take: ranks that run other programs for the same module, one of them in plain Python say, still add up the same numbers.

What a gradient held before, from backwards under ``no_sync()`` or without ``zero_grad()``, is added before the bucket
is reduced: the mean of the sums is what stock DDP computes. Afterwards ``param.grad`` is a view of its bucket, unless
it was a tensor of the user's. A parameter that this rank has no gradient for contributes zeros, and gets the mean if
another rank has one (``MarksOfUse``); if none has, it keeps what it had. As in stock DDP, a backward whose forward did
not go through the module is left alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.distributed.collectives.averaging import Averaging
from gradsplit.distributed.collectives.measure_costs import ReadyTimes
from gradsplit.distributed.collectives.work import Work
from gradsplit.distributed.gradients.accumulation_nodes import AccumulationNodes
from gradsplit.distributed.gradients.anchors import Anchors
from gradsplit.distributed.gradients.announced_programs import AnnouncedPrograms
from gradsplit.distributed.gradients.asked_gradients import reduces_what_it_reaches, returns_values
from gradsplit.distributed.gradients.bucket_buffers import BucketBuffers, gradient_strides
from gradsplit.distributed.gradients.earlier_gradients import EarlierGradients
from gradsplit.distributed.gradients.late_hooks import LateHooks
from gradsplit.distributed.gradients.marks_of_use import MarksOfUse
from gradsplit.distributed.gradients.paths_of_backward import reached_results
from gradsplit.distributed.gradients.reduction_round import ReductionRound
from gradsplit.distributed.gradients.rounds_of_backward import is_next, note_round
from gradsplit.distributed.gradients.running_backward import backward_number, will_run
from gradsplit.distributed.gradients.static_graph import StaticGraph
from gradsplit.distributed.gradients.undefined_gradients import UndefinedGradients
from gradsplit.distributed.gradients.watchers import GradientObserver, Watch
from gradsplit.distributed.gradients.writing_streams import WritingStreams
from gradsplit.distributed.optimizer_steps.step_in_backward import StepInBackward

_requires_grad = operator.attrgetter("requires_grad")


class GradientBuckets:
    """The communicator of one ``DistributedDataParallel`` module; see ``gradsplit.compile_core.ir.communicator``.

    Args:
        parameters: those whose gradients are reduced, by name.
        group: over which ranks.
        averaging: how buckets are reduced; an attribute, too.
        watch: over failures of ranks. Where streams wait, a collective that was aborted leaves numbers without meaning.
        stepper: steps an optimizer in the rounds, if one is to be.
        round_begins: is called before any gradient of a round has come.

    Attributes:
        factor: what a gradient must be multiplied with when it is stored; see ``Averaging``.
        strides: of the places that are not contiguous, as the parameters lay when this was made. Programs are compiled
            for these, so they stay.
        device: where they are.
        expecting: a forward of the module ran whose backward has not ended yet.
        missing: the parameters that got no gradient on this rank in the rounds since the last forward.
        static_graph: what is known of all rounds, if the program says that they are alike.
        rounds: how many have ended.
        ready_times: measures rounds, in which everything is reduced last.
        observer: is told of rounds.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        averaging: Averaging,
        watch: Watch,
        stepper: StepInBackward | None = None,
        round_begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = dict(parameters)
        self._all_strides = {name: gradient_strides(parameter) for name, parameter in parameters.items()}
        self.strides = {
            name: strides
            for name, strides in self._all_strides.items()
            if strides != contiguous_strides(tuple(parameters[name].shape))
        }
        self.group = group
        self.factor = averaging.factor
        self.expecting = False
        # Whether results of the last forward tell of backwards; whether the round reduces even if no gradient comes.
        self._tells = self._is_due = False
        self.missing: tuple[str, ...] = ()
        self.static_graph: StaticGraph | None = None
        self._awaited: set[str] = set()
        self.rounds = 0
        self.ready_times: ReadyTimes | None = None
        self.observer: GradientObserver | None = None
        self.averaging = averaging
        self._stepper = stepper
        self._round_begins = round_begins
        self.wait = operator.methodcaller("wait") if averaging.on_streams else watch.wait
        self._watch = watch
        self.device = next(iter(self.parameters.values())).device
        self._nodes = AccumulationNodes(self.parameters, self._backward_reaches, self._accumulated)
        self.hooked = self._nodes.hooked
        self._anchors = Anchors(self.parameters, self._nodes)
        self.anchor = self._anchors.of_program
        self.wanted_values, self.take_values = self._anchors.wanted_values, self._anchors.take_values
        self._buffers: BucketBuffers | None = None
        self._marks: MarksOfUse | None = None
        self._announced = AnnouncedPrograms()
        self.expect = self._announced.add
        self._round: ReductionRound | None = None
        # Of the round, those with hooks, and those for which it is not.
        self._hooked: frozenset[str] = frozenset()
        self._unasked: frozenset[str] = frozenset()
        self._late_hooks = LateHooks(self.parameters, self.factor)
        # Those that this rank has no gradient for.
        self._without: set[str] = set()
        self._earlier = EarlierGradients(self.parameters)
        self._scratch: dict[str, torch.Tensor] = {}
        # Of the program that runs, and of the one that runs next.
        self._undefined = self._next_undefined = UndefinedGradients()
        self._works: list[Work] = []
        # Those of a round that broke off, until they are waited for.
        self._unfinished: list[Work] | None = None
        self._writers = WritingStreams(self.device, averaging.on_streams)
        # Whether the program that runs is to store; it is not where only gradients of inputs are asked for.
        self._storing = True

    @property
    def plan(self) -> BucketPlan | None:
        """The plan in use; ``None`` before the first."""
        return None if self._buffers is None else self._buffers.plan

    @property
    def has_to_start(self) -> bool:
        return self._round is not None and self._round.has_to_start

    @property
    def shared_bytes(self) -> int:
        """Of the buckets that other ranks reach, which torch's allocator does not count."""
        return 0 if self._buffers is None else self._buffers.shared_bytes

    def place(self, name: str) -> torch.Tensor:
        """Where a parameter's gradient lies in its bucket, once there is a plan."""
        assert self._buffers is not None
        return self._buffers.places[name]

    def refuse_changed(self) -> None:
        """
        Raises:
            CompileError: the gradient of a parameter, as that is now, has no place in the buckets.
        """
        if self._buffers is None:
            return
        if self._round is None:
            self._buffers.restore_places()
        self._buffers.refuse_changed(self.parameters)

    def adopt(self, plan: BucketPlan) -> None:
        """Uses this plan from now on, as all ranks do; gradients that lie in the buckets of the one before move.

        Raises:
            InternalError: a backward is under way.
        """
        if self._round is not None:
            raise InternalError("bucket plans cannot change during a backward")
        before = self._buffers
        self._buffers = BucketBuffers(plan, self.parameters, self._all_strides, self.averaging.allocate)
        self._marks = MarksOfUse(self._buffers)
        if before is None:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and before.hold(name, parameter.grad) and not before.is_kept(name):
                parameter.grad = self._buffers.places[name].copy_(parameter.grad)

    def begin_forward(self) -> None:
        """A call of the module begins: what an unfinished backward has left is cleared away."""
        if backward_number() == -1:
            self.break_off()
            self._await_unfinished()
        if self._stepper is not None and self._round is None:
            self._stepper.begin_forward()

    def break_off(self) -> None:
        """The backward of the round raised: gradients are again what they were, in buckets as copies, since all-reduces
        may be under way there. Those are waited for later: where other ranks do not start them, that would hide this.
        """
        if self._round is None:
            return
        self._earlier.restore()
        self._unfinished = [*self._works]
        self._next_undefined = UndefinedGradients()
        self._clear(expecting=self.expecting)

    def _await_unfinished(self) -> None:
        works, self._unfinished = self._unfinished, None
        for work in works or ():
            self.wait(work)
        if works is not None and self._stepper is not None:
            self._stepper.abandon_round()

    def expect_backward(self, result: Any) -> None:
        """A synchronised call of the module ended: the backward that reaches its result is a round.

        A round must begin in the backward that the program asked for, or it would end with the first of those that
        reentrant checkpoints run inside of it.
        """
        self.expecting = True
        self._awaited = set(self.parameters)
        results = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        nodes = {value.grad_fn for value in results if value.grad_fn is not None}
        self._tells = bool(nodes)
        for node in nodes:
            node.register_prehook(self._backward_reaches_result)
        if self._stepper is not None:
            self._stepper.expect_backward(is_noticed=bool(nodes))

    def leave_out(self, node: Any, results_of: Mapping[str, Collection[int]]) -> None:
        if self._anchors.programs_store():
            undefined, static = UndefinedGradients.of_program(node, results_of), self.static_graph
            unused = frozenset() if static is None else static.left_unused(undefined.zeros)
            self._next_undefined = undefined.with_missing(unused)

    def begin(self) -> None:
        self._undefined = self._next_undefined.with_missing(self._anchors.unasked())
        self._next_undefined = UndefinedGradients()
        self._storing = self._anchors.programs_store()
        if self._storing and self._round is None:
            self._open_round()
        if self._storing and self._stepper is not None:
            self._stepper.program_begins()

    def _are_first(self, *names: str) -> bool:
        """Whether what a program stores of these is the first of the round, which goes to their places."""
        is_first = self._storing and self._round is not None and self._round.stored.isdisjoint(names)
        return is_first and self._late_hooks.names.isdisjoint(names)

    def usual_places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        if self._buffers is None or not self._are_first(*names):
            return None
        return [*map(self._buffers.places.__getitem__, names)]

    def destinations(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        usual = self.usual_places(names)
        return [*map(self._destination, names)] if usual is None else usual

    def _destination(self, name: str) -> torch.Tensor:
        place = self.place(name)
        if self._are_first(name):
            return place
        scratch = self._scratch[name] = torch.empty_like(place)
        return scratch

    def arrived(self, names: Sequence[str], values: Mapping[str, torch.Tensor] | None) -> None:
        if not self._storing:
            self._scratch.clear()
            return
        assert self._round is not None and self._buffers is not None
        zeros = self._undefined.zeros.intersection(names) - self._round.stored
        for name, contribution in self._scratch.items():
            if not self._undefined.include(name):
                self._round.refuse_late(name, self.static_graph is not None)
                if name in self._late_hooks.names:
                    self._late_hooks.add(name, contribution)
                else:
                    self._add(name, contribution)
        self._scratch.clear()
        if not self._late_hooks.names.isdisjoint(names):
            names = self._late_hooks.take(names, self._round)
        for name in zeros:
            # What a program computes from zeros need not be zero: it may divide by another.
            self._awaited_place(name).zero_()
        if missing := self._undefined.missing:
            self._round.nothing_comes([name for name in names if name in missing])
            names = [name for name in names if name not in missing]
        if names:
            self._buffers.look_for_anomalies(names)
            self._note(names)
        if self._stepper is not None:
            self._stepper.region_ended(values)

    def _backward_reaches_result(self, *_: Any) -> None:
        """Before the engine runs the node of a result of the module: every such backward is a round, on all ranks."""
        if self._round is None and self._buffers is not None and not returns_values():
            self._open_round()
        if self._stepper is not None:
            self._stepper.module_reached()

    def _backward_reaches(self, *_: Any) -> None:
        """Before the engine accumulates a gradient."""
        if self.expecting and self._round is None and self._buffers is not None and not returns_values():
            self._open_round()

    def _accumulated(self, name: str, *_: Any) -> None:
        """The engine has accumulated a gradient."""
        if self._round is None:
            return
        assert self._buffers is not None
        parameter = self.parameters[name]
        found = parameter.grad
        if found is not None:
            self._round.refuse_late(name, self.static_graph is not None)
            if name in self._hooked:
                # Hooks see all that has been accumulated by then, and not how it is reduced.
                parameter.grad = found.clone() if self._buffers.hold(name, found) else found
                torch.mul(found.detach(), self.factor, out=self._awaited_place(name))
            else:
                self._add(name, found.detach(), self.factor)
                # Should more come, it comes alone.
                parameter.grad = None
        elif not reached_results(self._nodes.by_name[name]):
            self._round.nothing_comes((name,))
            return
        elif name in self._hooked or name not in self._round.stored:
            # A function has left it undefined, or a hook has taken it: zeros, where the last round's mean may lie.
            self._awaited_place(name).zero_()
        self._note((name,))

    def _add(self, name: str, value: torch.Tensor, factor: float = 1.0) -> None:
        """To what has come to a gradient in this round, if anything has."""
        assert self._round is not None
        place = self._awaited_place(name)
        if name in self._round.stored:
            place.add_(value, alpha=factor)
        else:
            torch.mul(value, factor, out=place)

    def _awaited_place(self, name: str) -> torch.Tensor:
        """Its place, after what other streams have stored."""
        self._writers.wait()
        return self.place(name)

    def _open_round(self) -> None:
        assert self._buffers is not None
        self._await_unfinished()
        note_round(self, self.parameters, backward_number())
        self._round_begins()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_round)
        self._buffers.restore_places()
        # Programs store nothing where only gradients of inputs are asked for.
        announced = self._announced.contributions() if self._anchors.programs_store() else Counter()
        by_programs = set(announced)
        # Those with hooks come through the engine, and their hooks see them accumulated.
        hooked = self._hooked = self.hooked()
        self._unasked = self._anchors.unasked()
        by_engine = {name for name, node in self._nodes.by_name.items() if will_run(node)}
        self._late_hooks.begin(hooked & by_programs, by_engine)
        by_programs -= hooked
        announced.update(by_engine)
        static, unused = self.static_graph, frozenset()
        if static is not None and static.is_known:
            announced, unused = static.expected(announced), static.unused
        self._round = ReductionRound(self._buffers.names, announced, unused)
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                is_left = name in by_programs or not (name in by_engine or name in hooked)
                self._earlier.note(name, gradient, self._buffers, is_left)
        self._is_due = reduces_what_it_reaches() and any(map(_requires_grad, self.parameters.values()))
        if self._stepper is not None:
            alone = by_programs - by_engine
            self._stepper.begin_round(name for name in alone if not self._earlier.is_users(name))
        if self.ready_times is not None:
            self.ready_times.round_began()

    def _note(self, names: Sequence[str]) -> None:
        assert self._round is not None
        self._writers.note()
        if self.static_graph is not None:
            self.static_graph.check(names)
        self._round.arrived(names)
        if self.observer is not None:
            self.observer.gradients_arrived(names)
        if self.ready_times is not None:
            self.ready_times.gradients_arrived(names)
            return
        if (self.static_graph is None or self.static_graph.is_known) and is_next(self):
            for bucket in self._round.take_complete():
                self._start(bucket)

    def _start(self, bucket: int) -> None:
        assert self._buffers is not None and self._round is not None and self._marks is not None
        self._watch.at_point()
        self._writers.wait()
        names = self._buffers.names[bucket]
        # As a rule all have come, to where nothing was before.
        if self._earlier.aside or not self._round.stored.issuperset(names):
            for name in names:
                self._complete(name)
        without = self._without.intersection(names)
        if without or not self._marks.are_there(names):
            self._marks.write(bucket, without)
        flat = self._buffers.flat[bucket]
        self._watch.begins(f"averages {flat.numel()} values of bucket {bucket}")
        if self.observer is not None:
            self.observer.collective_starting(bucket)
        work = self.averaging.start(flat, self._buffers.allocated[bucket])
        self._works.append(work)
        if self._stepper is not None:
            ours = [name for name in names if not (self._earlier.is_users(name) or name in without)]
            for name in ours:
                self._earlier.give(name, self._buffers, ())
            self._stepper.reducing(ours, work)
        if self.observer is not None:
            gradients = flat[: self._buffers.plan.buckets[bucket].numel]
            self.observer.collective_started(bucket, self.averaging.wire_bytes(gradients), work)

    def _complete(self, name: str) -> None:
        """Adds what the gradient was before this round, where that is not part of it yet."""
        assert self._round is not None
        is_stored, earlier, static = name in self._round.stored, self._earlier, self.static_graph
        before = self._earlier.before.get(name)
        if not is_stored and (before is None or name in self._unasked or (static and name in static.unused)):
            self._without.add(name)
        if is_stored and name in earlier.aside:
            self._add(name, earlier.aside[name], self.factor)
        elif not is_stored and before is not None:
            self._add(name, earlier.aside.get(name, before), self.factor)
        elif not is_stored:
            self._awaited_place(name).zero_()

    def _end_round(self) -> None:
        assert self._round is not None and self._buffers is not None
        if not (self._round.has_begun or self._is_due):
            # No gradient of a parameter was asked for.
            self._earlier.put_back()
            self._clear(expecting=self.expecting)
            return
        self._watch.at_point()
        if self.ready_times is not None:
            self._writers.wait()
            self.ready_times.all_computed()
        with torch.no_grad():
            static, stored = self.static_graph, self._round.stored
            if static is not None and not static.is_known:
                static.learn(self._round.contributions())
            for bucket in self._round.take_rest():
                self._start(bucket)
            if self.ready_times is not None:
                self.ready_times.all_started(len(self._works))
            for work in self._works:
                self.wait(work)
            self._awaited -= stored if static is None else stored | static.unused
            self.missing = tuple(filter(self._awaited.__contains__, self.parameters))
            if self._earlier.before or self._without:
                assert self._marks is not None
                used_by_none = self._marks.used_by_none(self._without)
                for name in self.parameters:
                    self._earlier.give(name, self._buffers, used_by_none)
            else:
                for name in stored:
                    self.parameters[name].grad = self._buffers.places[name]
            if self._stepper is not None:
                of_buckets = zip(self._buffers.flat, map(len, self._buffers.names), strict=True)
                before = self._earlier.before.items()
                of_users = ((gradient, 1) for name, gradient in before if self._earlier.is_users(name))
                self._stepper.end_round((*of_buckets, *of_users))
        # As stock DDP, a forward may be followed by several backwards, each for some of the parameters. Where results
        # tell of these, other backwards are none of ours: ranks may be missing different ones.
        self._clear(expecting=bool(self.missing) and not self._tells)
        self.rounds += 1

    def _clear(self, expecting: bool = False) -> None:
        self._round = None
        self.expecting = expecting
        self._works.clear()
        self._writers.clear()
        self._earlier.clear()
        self._scratch.clear()
        self._late_hooks.clear()
        self._without.clear()
