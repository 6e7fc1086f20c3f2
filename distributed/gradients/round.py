"""One backward of a module: gradients come in, are averaged over ranks bucket by bucket, and become ``param.grad``.

When it begins the engine is asked what it will run, so it is known how many contributions each gradient gets; a bucket
is started when the last has come to its last gradient, and what is left at the end. So each backward reduces each
bucket once, in the plan's order, also where ranks run other programs for the same module.

What a gradient held before, from backwards under ``no_sync()`` or without ``zero_grad()``, is added before the bucket
is reduced: the mean of the sums is what stock DDP computes. Afterwards ``param.grad`` is a view of its bucket, unless
it was a tensor of the user's. A parameter that this rank has no gradient for contributes zeros, and gets the mean if
another rank has one (``MarksOfUse``); if none has, it keeps what it had.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from gradsplit.compile_core.torch_facts.autograd_engine import current_graph_task_id, will_engine_execute_node
from gradsplit.distributed.collectives.work import Work
from gradsplit.distributed.gradients.accumulation_nodes import AccumulationNodes
from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.gradients.contributions import Contributions
from gradsplit.distributed.gradients.earlier_gradients import EarlierGradients
from gradsplit.distributed.gradients.late_hooks import LateHooks
from gradsplit.distributed.gradients.paths_of_backward import reached_results
from gradsplit.distributed.gradients.requested_gradients import not_requested, reduces_what_it_reaches
from gradsplit.distributed.gradients.rounds_of_backward import is_next
from gradsplit.distributed.streams import WritingStreams

_requires_grad = operator.attrgetter("requires_grad")


class Round:
    """Made in the backward that it is of, before any gradient has come; ends with it, or breaks off if that raises.

    Args:
        buckets: those of the module, which have a plan.
        nodes: where the engine accumulates the gradients.
        announced: how many contributions to each gradient compiled programs will make.

    Raises:
        CompileError: a parameter got a hook when it was too late.

    Attributes:
        backward: the engine's number of the backward.
        stored: the gradients to which something has come.
        unused: those to which nothing ever comes on this rank, by what is known of a static graph.
        works: the averages that were started.
    """

    def __init__(self, buckets: Buckets, nodes: AccumulationNodes, announced: Counter[str]) -> None:
        assert buckets.buffers is not None and buckets.marks is not None
        self._buckets, self._buffers, self._marks = buckets, buckets.buffers, buckets.marks
        self._nodes = nodes
        self.parameters: Mapping[str, torch.nn.Parameter] = buckets.parameters
        self.group = buckets.group
        self.backward = current_graph_task_id()
        self._factor = buckets.averaging.factor
        # Those with hooks of the program's come through the engine, so that the hooks see them accumulated.
        self._hooked = nodes.hooked()
        self._by_engine = {name for name, node in nodes.by_name.items() if will_engine_execute_node(node)}
        by_programs = frozenset(announced)
        self._by_programs = by_programs - self._hooked
        self._late_hooks = LateHooks(
            self.parameters, self._factor, self._hooked & by_programs, self._by_engine
        )
        self._not_requested = not_requested(self.parameters)
        announced.update(self._by_engine)
        expected: Mapping[str, int] = announced
        self._static, self.unused = buckets.static_graph, frozenset[str]()
        if self._static is not None and self._static.is_known:
            expected, self.unused = self._static.expected(expected), self._static.unused
        self._contributions = Contributions(self._buffers.names, expected, self.unused)
        self.stored = self._contributions.stored
        self._earlier = EarlierGradients(self.parameters, self._buffers)
        # Those that this rank has no gradient for.
        self._without: set[str] = set()
        self._writers = WritingStreams(buckets.device, buckets.averaging.on_streams)
        # It reduces even if no gradient comes.
        self._is_due = reduces_what_it_reaches() and any(map(_requires_grad, self.parameters.values()))
        self.works: list[Work] = []

    def begin(self) -> None:
        """Sets earlier gradients aside that are no part of what comes."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                is_added_to = name in self._by_engine or name in self._hooked
                self._earlier.note(name, parameter.grad, name in self._by_programs or not is_added_to)
        if self._buckets.stepper is not None:
            alone = self._by_programs - self._by_engine
            self._buckets.stepper.begin_round(name for name in alone if not self._earlier.is_users(name))
        if self._buckets.ready_times is not None:
            self._buckets.ready_times.round_began()

    @property
    def has_to_start(self) -> bool:
        """Whether a bucket is not started yet."""
        return self._contributions.has_to_start

    def places(self, names: Sequence[str]) -> Sequence[torch.Tensor] | None:
        """Where a program stores these, if what it stores is the first of the round; else it is to be added."""
        if self.stored.isdisjoint(names) and self._late_hooks.names.isdisjoint(names):
            return [*map(self._buffers.places.__getitem__, names)]
        return None

    def add_stored(self, name: str, contribution: torch.Tensor) -> None:
        """A program has stored this contribution, of the gradient's shape and dtype, elsewhere than at its place."""
        self._refuse_late(name)
        if name in self._late_hooks.names:
            self._late_hooks.add(name, contribution)
        else:
            self._add(name, contribution)

    def programs_stored(self, names: Sequence[str], missing: frozenset[str], zeros: Iterable[str]) -> None:
        """A program has contributed to these, but to those that are ``missing``; what it has stored of ``zeros`` is
        not what they are."""
        if not self._late_hooks.names.isdisjoint(names):
            names = self._late_hooks.take(names, self._contributions)
        for name in zeros:
            # What a program computes from zeros need not be zero: it may divide by another.
            self._place(name).zero_()
        if missing:
            self._contributions.nothing_comes([name for name in names if name in missing])
            names = [name for name in names if name not in missing]
        if names:
            self._buffers.look_for_anomalies(names)
            self._note(names)

    def accumulated(self, name: str) -> None:
        """The engine has accumulated a gradient."""
        parameter = self.parameters[name]
        found = parameter.grad
        if found is not None:
            self._refuse_late(name)
            if name in self._hooked:
                # Hooks see all that has been accumulated by then, and not how it is reduced.
                parameter.grad = found.clone() if self._buffers.hold(name, found) else found
                torch.mul(found.detach(), self._factor, out=self._place(name))
            else:
                self._add(name, found.detach(), self._factor)
                # Should more come, it comes alone.
                parameter.grad = None
        elif not reached_results(self._nodes.by_name[name]):
            self._contributions.nothing_comes((name,))
            return
        elif name in self._hooked or name not in self.stored:
            # A function has left it undefined, or a hook has taken it: zeros, where the last round's mean may lie.
            self._place(name).zero_()
        self._note((name,))

    def end(self) -> bool:
        """The backward is over: reduces what is left and sets the gradients, and returns whether there were any."""
        buckets, static = self._buckets, self._static
        if not (self._contributions.has_begun or self._is_due):
            # No gradient of a parameter was asked for.
            self._earlier.put_back()
            return False
        buckets.watch.check_failures()
        if buckets.ready_times is not None:
            self._writers.wait()
            buckets.ready_times.all_computed()
        with torch.no_grad():
            if static is not None and not static.is_known:
                static.learn(self._contributions.counts())
                self.unused = static.unused
            for bucket in self._contributions.take_rest():
                self._start(bucket)
            if buckets.ready_times is not None:
                buckets.ready_times.all_started(len(self.works))
            for work in self.works:
                buckets.wait(work)
            if self._earlier.before or self._without:
                used_by_none = self._marks.used_by_none(self._without)
                for name in self.parameters:
                    self._earlier.give(name, used_by_none)
            else:
                for name in self.stored:
                    self.parameters[name].grad = self._buffers.places[name]
            if buckets.stepper is not None:
                of_buckets = zip(self._buffers.flat, map(len, self._buffers.names), strict=True)
                of_users = ((gradient, 1) for gradient in self._earlier.of_users())
                buckets.stepper.end_round((*of_buckets, *of_users))
        return True

    def break_off(self) -> None:
        """The backward raised: gradients are again what they were, in buckets as copies, since averages may be under
        way there."""
        self._earlier.restore()

    def _refuse_late(self, name: str) -> None:
        self._contributions.refuse_late(name, self._static is not None)

    def _add(self, name: str, value: torch.Tensor, factor: float = 1.0) -> None:
        """To what has come to a gradient in this round, if anything has."""
        place = self._place(name)
        if name in self.stored:
            place.add_(value, alpha=factor)
        else:
            torch.mul(value, factor, out=place)

    def _place(self, name: str) -> torch.Tensor:
        """Its place, after what other streams have stored."""
        self._writers.wait()
        return self._buffers.places[name]

    def _note(self, names: Sequence[str]) -> None:
        """These have got a contribution."""
        buckets = self._buckets
        self._writers.note()
        if self._static is not None:
            self._static.check(names)
        self._contributions.arrived(names)
        if buckets.observer is not None:
            buckets.observer.gradients_arrived(names)
        if buckets.ready_times is not None:
            buckets.ready_times.gradients_arrived(names)
            return
        if (self._static is None or self._static.is_known) and is_next(self):
            for bucket in self._contributions.take_complete():
                self._start(bucket)

    def _start(self, bucket: int) -> None:
        buckets, buffers = self._buckets, self._buffers
        buckets.watch.check_failures()
        self._writers.wait()
        names = buffers.names[bucket]
        # As a rule all have come, to where nothing was before.
        if self._earlier.aside or not self.stored.issuperset(names):
            for name in names:
                self._complete(name)
        without = self._without.intersection(names)
        if without or not self._marks.are_there(names):
            self._marks.write(bucket, without)
        flat = buffers.flat[bucket]
        buckets.watch.begins(f"averages {flat.numel()} values of bucket {bucket}")
        if buckets.observer is not None:
            buckets.observer.collective_starting(bucket)
        work = buckets.averaging.start(flat, buffers.allocated[bucket])
        self.works.append(work)
        if buckets.stepper is not None:
            ours = [name for name in names if not (self._earlier.is_users(name) or name in without)]
            for name in ours:
                self._earlier.give(name, ())
            buckets.stepper.reducing(ours, work)
        if buckets.observer is not None:
            gradients = flat[: buffers.plan.buckets[bucket].numel]
            buckets.observer.collective_started(bucket, buckets.averaging.wire_bytes(gradients), work)

    def _complete(self, name: str) -> None:
        """Adds the gradient from before this round, unless it is included already."""
        is_stored, aside = name in self.stored, self._earlier.aside
        before = self._earlier.before.get(name)
        if not is_stored and (before is None or name in self._not_requested or name in self.unused):
            self._without.add(name)
        if is_stored and name in aside:
            self._add(name, aside[name], self._factor)
        elif not is_stored and before is not None:
            self._add(name, aside.get(name, before), self._factor)
        elif not is_stored:
            self._place(name).zero_()
