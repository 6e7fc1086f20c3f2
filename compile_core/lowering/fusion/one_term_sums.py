"""Sums of which one term at most is not zero, as a look-up.

The gradient of a cross-entropy is, in each row, a number at the target's column and zeros elsewhere; the gradient of
the log-softmax before it sums that row. Walking all columns to add up zeros takes as long as half of the kernel. Such a
sum is the number itself if the column is one of the row's, and zero if not: it needs no reduction, nor does what
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gradsplit.compile_core.ir.loops import (
    Apply,
    Constant,
    Load,
    LoopNest,
    Position,
    Reduce,
    Statement,
    Store,
    operands,
)
from gradsplit.compile_core.lowering.nests.body_builder import BodyBuilder
from gradsplit.compile_core.lowering.nests.live_statements import renumbered, without_dead_statements
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes, with_axes

# Operations of one argument that keep zero, between the choice of the term and the sum.
_KEEP_ZERO = frozenset({"round_to", "cast", "neg"})


@dataclass(frozen=True)
class _Term:
    """A sum's only term: ``value`` where the reduced index, which starts at ``first``, is ``place``.

    ``changes`` are the operations that the term goes through on its way to the sum, last first.
    """

    place: int
    value: int
    first: int
    changes: tuple[Apply, ...]


def without_one_term_sums(nest: LoopNest, buffer_dtype: Callable[[str], torch.dtype]) -> LoopNest:
    """The nest with look-ups in the place of such sums; without reduced axes if it needs them no longer."""
    axes = [axis for axis in range(parallel_axes(nest), len(nest.extents)) if nest.extents[axis] != 1]
    terms = _terms(nest, axes[0]) if len(axes) == 1 else {}
    if not terms:
        return nest
    builder = BodyBuilder(nest.extents, buffer_dtype)
    number: dict[int, int] = {}
    for n, statement in enumerate(nest.body):
        if n in terms and isinstance(statement, Reduce):
            number[n] = _look_up(builder, terms[n], number, nest.extents[axes[0]], statement.dtype)
        else:
            number[n] = builder.add(renumbered(statement, number))
    changed = replace(nest, body=without_dead_statements(builder.statements))
    if any(isinstance(statement, Reduce) for statement in changed.body):
        return changed
    moved = [walk[axes[0]] != 0 for walk in _walks(changed.body)]
    if not any(moved):
        kept = [axis for axis in range(len(nest.extents)) if axis < parallel_axes(nest)]
        return with_axes(changed, kept)
    # Without a reduction its axis is a parallel one, at each point of which all is stored.
    stores = [s.access.strides[axes[0]] for s in changed.body if isinstance(s, Store)]
    return replace(changed, reduced_axes=0) if all(stores) else nest


def _look_up(
    builder: BodyBuilder, term: _Term, number: dict[int, int], extent: int, dtype: torch.dtype
) -> int:
    place, value = builder.cast(number[term.place], torch.int64), number[term.value]
    first, end = (builder.constant(edge, torch.int64) for edge in (term.first, term.first + extent))
    inside = builder.apply(
        "logical_and",
        (builder.apply("ge", (place, first), torch.bool), builder.apply("lt", (place, end), torch.bool)),
        torch.bool,
    )
    for change in reversed(term.changes):
        value = builder.apply(change.operation, (value,), change.dtype, change.parameter)
    value = builder.cast(value, dtype)
    return builder.apply("where", (inside, value, builder.constant(0, dtype)), dtype)


def _terms(nest: LoopNest, axis: int) -> dict[int, _Term]:
    """The sums along ``axis`` that have one term."""
    body, moving = nest.body, set[int]()
    found = {}
    for n, statement in enumerate(body):
        if isinstance(statement, Reduce):
            if statement.operation == "sum" and statement.argument in moving:
                term = _term(body, statement.argument, axis, moving)
                if term is not None:
                    found[n] = term
        elif any(operand in moving for operand in operands(statement)) or any(
            walk[axis] for walk in _walks([statement])
        ):
            moving.add(n)
    return found


def _term(body: Sequence[Statement], argument: int, axis: int, moving: set[int]) -> _Term | None:
    changes = []
    statement = body[argument]
    while isinstance(statement, Apply) and statement.operation in _KEEP_ZERO:
        changes.append(statement)
        statement = body[statement.arguments[0]]
    if not isinstance(statement, Apply) or statement.operation != "where":
        return None
    chosen, value, other = statement.arguments
    equality, zero = body[chosen], body[other]
    if not (isinstance(zero, Constant) and zero.value == 0) or value in moving:
        return None
    if not isinstance(equality, Apply) or equality.operation != "eq":
        return None
    for position, place in (equality.arguments, equality.arguments[::-1]):
        walk = body[position]
        if isinstance(walk, Position) and place not in moving:
            along = [step for other_axis, step in enumerate(walk.strides) if step and other_axis != axis]
            if walk.strides[axis] == 1 and not along:
                return _Term(place, value, walk.offset, tuple(changes))
    return None


def _walks(body: Sequence[Statement]) -> list[tuple[int, ...]]:
    walks = [s.access.strides for s in body if isinstance(s, Load | Store)]
    return walks + [s.strides for s in body if isinstance(s, Position)]
