"""What code generation must know of a loop nest before it writes a line, the same for C++ and Triton.

Three questions are answered here. Over which axes does each value vary (so that it is computed in the
outermost loop where it can be)? How often must the reduced axes be walked, and which statements belong to
which walk? Which values does a later walk recompute, and which does it keep from an earlier one?

A walk is called a *pass*. A value's *level* is the number of reductions that must be finished before it can
be computed, along the longest chain: in a softmax ``x`` has level 0, ``exp(x - max(x))`` has level 1, its
quotient by the sum has level 2. Pass ``p`` finishes the reductions whose argument has level ``p`` and
executes the stores of level ``p``, so reductions that do not need each other share a pass. Values that do not
vary over the reduced axes are not computed in passes but before them, at their level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.loops import (
    Apply,
    Constant,
    Load,
    LoopNest,
    Position,
    Reduce,
    Statement,
    Store,
    accesses,
    operands,
    varied_axes,
)

_COSTS = {
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 4),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "tanh", "erf"), 12),
    **dict.fromkeys(("sin", "cos", "floor_div", "trunc_div", "remainder", "fmod"), 20),
    **dict.fromkeys(("random_bits", "random_word"), 30),
    **dict.fromkeys(("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2"), 40),
    **dict.fromkeys(("pow", "erfc", "lgamma", "hypot", "nextafter"), 60),
}

# Recomputing up to this cost is cheaper than a round trip through a scratch buffer in the first-level cache.
KEEP_ABOVE_COST = 8


def statement_cost(statement: Statement) -> int:
    """Roughly, the time of one vector instruction's worth of a statement, an addition being 1."""
    match statement:
        case Load(access=access):
            return 4 if access.gathers else 1
        case Apply(operation=operation):
            return _COSTS.get(operation, 1)
        case Reduce():
            return 2
        case _:
            return 1 if isinstance(statement, Store) else 0


@dataclass(frozen=True)
class NestPass:
    """One walk over the reduced axes.

    Attributes:
        before: values that do not vary over the reduced axes, and stores of them, in order, to execute ahead
        of it.
        values: loads and computations of the walk, in order, without ``kept``.
        kept: values read back from where an earlier pass put them.
        keeps: values of this pass that a later one reads back.
        reduces: reductions that this pass finishes.
        stores: stores that it executes at every point.
    """

    before: tuple[int, ...]
    values: tuple[int, ...]
    kept: tuple[int, ...]
    keeps: tuple[int, ...]
    reduces: tuple[int, ...]
    stores: tuple[int, ...]

    @property
    def walks(self) -> bool:
        return bool(self.reduces or self.stores)


@dataclass(frozen=True)
class NestAnalysis:
    """Facts about ``nest.body``, indexed as its statements.

    Attributes:
        axes: the axes over which a statement's value varies; for a store, over which it must be repeated.
        levels: see the file's head.
        passes: the walks, in order. The last may have nothing but ``before``.
    """

    nest: LoopNest
    axes: tuple[frozenset[int], ...]
    levels: tuple[int, ...]
    passes: tuple[NestPass, ...]

    @property
    def reduced(self) -> frozenset[int]:
        count = len(self.nest.extents)
        return frozenset(range(count - self.nest.reduced_axes, count))

    def walks_with(self, value: int) -> bool:
        """Whether a statement belongs inside the passes."""
        return not self.nest.reduced_axes or bool(self.axes[value] & self.reduced)


def buffers_of(nest: LoopNest) -> tuple[str, ...]:
    """The nest's buffers in the order in which its body first names them."""
    return tuple(dict.fromkeys(access.buffer for access in accesses(nest)))


def stored_buffers(nest: LoopNest) -> frozenset[str]:
    return frozenset(statement.access.buffer for statement in nest.body if isinstance(statement, Store))


def value_dtypes(nest: LoopNest) -> list[torch.dtype]:
    """The dtype of each statement's value; a store has none and answers anything."""
    return [torch.bool if isinstance(statement, Store) else statement.dtype for statement in nest.body]


def analyse(nest: LoopNest, keep_limit: int) -> NestAnalysis:
    """Splits a nest's body into passes.

    Args:
        nest: a valid nest.
        keep_limit: how many values a pass may keep for later ones; 0 recomputes everything.
    """
    axes = tuple(varied_axes(nest))
    levels = _levels(nest)
    walked = NestAnalysis(nest, axes, levels, ())
    late = _stores_that_wait(nest, levels)
    last = max((*levels, 0)) if nest.body else 0
    passes: list[NestPass] = []
    computed: set[int] = set()
    kept_overall: set[int] = set()
    for level in range(last + 1):
        reduces = tuple(
            n for n, s in enumerate(nest.body) if isinstance(s, Reduce) and levels[s.argument] == level
        )
        stores = tuple(
            n
            for n, s in enumerate(nest.body)
            if isinstance(s, Store) and walked.walks_with(n) and (last if n in late else levels[n]) == level
        )
        sinks = {operand for n in (*reduces, *stores) for operand in operands(nest.body[n])}
        values, kept = _needed(walked, sinks, computed, keep_limit - len(kept_overall), kept_overall)
        computed |= set(values)
        kept_overall |= set(kept)
        before = _before(walked, level, late, last)
        passes.append(NestPass(before, values, kept, (), reduces, stores))
    return NestAnalysis(nest, axes, levels, _with_keeps(_without_unused(walked, passes)))


def _levels(nest: LoopNest) -> tuple[int, ...]:
    levels: list[int] = []
    for statement in nest.body:
        level = max((levels[operand] for operand in operands(statement)), default=0)
        levels.append(level + isinstance(statement, Reduce))
    return tuple(levels)


def _stores_that_wait(nest: LoopNest, levels: Sequence[int]) -> frozenset[int]:
    """Stores into buffers that a later pass may still read: they belong to the last pass."""
    loaded = {s.access.buffer for s in nest.body if isinstance(s, Load)}
    return frozenset(n for n, s in enumerate(nest.body) if isinstance(s, Store) and s.access.buffer in loaded)


def _needed(
    walked: NestAnalysis, sinks: Iterable[int], computed: set[int], may_keep: int, kept_already: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a pass computes and what it reads back, so as to know ``sinks``."""
    body = walked.nest.body
    values: set[int] = set()
    kept: set[int] = set()
    # Values come in order of definition, so going down from the last meets every user before its operands.
    pending = {sink for sink in sinks if walked.walks_with(sink)}
    while pending:
        value = max(pending)
        pending.discard(value)
        known = value in kept_already
        if known or (
            value in computed
            and len(kept - kept_already) < may_keep
            and not isinstance(body[value], Load | Constant | Position)
            and _recompute_cost(walked, value) > KEEP_ABOVE_COST
        ):
            kept.add(value)
            continue
        values.add(value)
        pending |= {operand for operand in operands(body[value]) if walked.walks_with(operand)}
    return tuple(sorted(values)), tuple(sorted(kept))


def _recompute_cost(walked: NestAnalysis, value: int) -> int:
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current in seen or not walked.walks_with(current):
            continue
        seen.add(current)
        pending.extend(operands(walked.nest.body[current]))
    return sum(statement_cost(walked.nest.body[n]) for n in seen)


def _before(walked: NestAnalysis, level: int, late: frozenset[int], last: int) -> tuple[int, ...]:
    if not walked.nest.reduced_axes:
        return ()
    return tuple(
        n
        for n, statement in enumerate(walked.nest.body)
        if not isinstance(statement, Reduce)
        and not walked.walks_with(n)
        and (last if n in late else walked.levels[n]) == level
    )


def _without_unused(walked: NestAnalysis, passes: list[NestPass]) -> list[NestPass]:
    """Drops ``before`` values that nothing reads."""
    body = walked.nest.body
    used: set[int] = set()
    for step in passes:
        for n in (*step.values, *step.reduces, *step.stores):
            used |= set(operands(body[n]))
    for n in sorted((n for step in passes for n in step.before), reverse=True):
        if n in used or isinstance(body[n], Store):
            used |= set(operands(body[n]))
    return [
        replace(step, before=tuple(n for n in step.before if n in used or isinstance(body[n], Store)))
        for step in passes
    ]


def _with_keeps(passes: list[NestPass]) -> tuple[NestPass, ...]:
    finished: list[NestPass] = []
    wanted: set[int] = set()
    for step in reversed(passes):
        keeps = tuple(n for n in step.values if n in wanted)
        wanted = (wanted | set(step.kept)) - set(keeps)
        finished.append(replace(step, keeps=keeps))
    if wanted:
        raise InternalError(f"values {sorted(wanted)} are kept for a later pass but no pass computes them")
    return tuple(reversed(finished))
