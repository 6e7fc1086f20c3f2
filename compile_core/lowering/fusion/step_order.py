"""Which steps of a program must run before which, and an order that obeys it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import torch

from gradsplit.compile_core.ir.loops import ExternCall, Step
from gradsplit.compile_core.ir.step_effects import mutated, reads, writes


def direct_dependencies(steps: Sequence[Step]) -> list[set[int]]:
    """For each step the earlier ones that it must stay after: those that write what it reads or changes, those that
    read what it writes, and, if it draws random numbers, the last one that drew some."""
    last_writers: dict[str, set[int]] = {}
    readers_since: dict[str, set[int]] = {}
    last_random: set[int] = set()
    dependencies = []
    for number, step in enumerate(steps):
        direct: set[int] = set()
        overwritten = mutated(step)
        for name in reads(step):
            direct |= last_writers.get(name, set())
            readers_since.setdefault(name, set()).add(number)
        for name in writes(step):
            direct |= readers_since.get(name, set())
            if name in overwritten:
                direct |= last_writers.get(name, set())
            last_writers.setdefault(name, set()).add(number)
        if _draws_random_numbers(step):  # from one generator, in the order of the user's program
            direct |= last_random
            last_random = {number}
        dependencies.append(direct - {number})
    return dependencies


class Dependencies:
    """Which steps must run before which, by number, while steps are joined.

    Attributes:
        direct, followers: the steps that a step directly depends on, and those that directly depend on it.
        before: all steps that must run before a step, as a bit set over step numbers.
    """

    def __init__(self, direct: Sequence[set[int]]) -> None:
        self.direct = dict(enumerate(direct))
        self.followers: dict[int, set[int]] = {number: set() for number in self.direct}
        self.before: dict[int, int] = {}
        for number, others in self.direct.items():
            self.before[number] = 0
            for other in others:
                self.followers[other].add(number)
                self.before[number] |= self.before[other] | 1 << other

    def must_follow(self, later: int, earlier: int) -> bool:
        return bool(self.before[later] >> earlier & 1)

    def join(self, members: Collection[int], kept: int) -> None:
        """Makes some steps one, which has the number ``kept`` of one of them."""
        gone = set(members) - {kept}
        bits = sum(1 << number for number in members)
        before = 0
        for number in members:
            before |= self.before[number]
        for edges, inverse in ((self.direct, self.followers), (self.followers, self.direct)):
            edges[kept] = set[int]().union(*(edges[number] for number in members)).difference(members)
            for number in edges[kept]:
                inverse[number] = (inverse[number] - gone) | {kept}
        for number in gone:
            del self.direct[number], self.followers[number], self.before[number]
        self.before[kept] = before = before & ~bits
        for number, earlier in self.before.items():
            if earlier & bits:
                self.before[number] = (earlier & ~bits) | before | 1 << kept


def topological_order(direct: Mapping[int, set[int]], position: Mapping[int, float]) -> list[int]:
    """The steps' numbers, each after all that it depends on, otherwise by position."""
    waiting = {number: set(others) for number, others in direct.items()}
    followers: dict[int, list[int]] = {}
    for number, others in waiting.items():
        for other in others:
            followers.setdefault(other, []).append(number)
    ready = [(position[number], number) for number, others in waiting.items() if not others]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(number)
        for follower in followers.get(number, ()):
            waiting[follower].discard(number)
            if not waiting[follower]:
                heapq.heappush(ready, (position[follower], follower))
    assert len(ordered) == len(direct)
    return ordered


def _draws_random_numbers(step: Step) -> bool:
    return isinstance(step, ExternCall) and torch.Tag.nondeterministic_seeded in step.target.tags
