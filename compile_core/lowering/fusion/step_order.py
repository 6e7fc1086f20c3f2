"""Which steps of a program must run before which, and an order that obeys it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch

from gradsplit.compile_core.ir.loops import ExternCall, Step
from gradsplit.compile_core.ir.step_effects import mutated, reads, writes


def direct_dependencies(steps: Sequence[Step]) -> list[set[int]]:
    """For each step the earlier ones that it must stay behind: those that write what it reads or changes, those that
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


def topological_order(direct: Mapping[int, set[int]], position: Mapping[int, float]) -> list[int]:
    """The steps' numbers, each behind all that it depends on, otherwise by position."""
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
