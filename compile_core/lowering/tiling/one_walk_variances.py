"""Variances in one walk over their data, where a kernel on a GPU has to walk.

A variance is written as two sums, of the values and of the squared differences from their mean: exact, but the second
needs the first, so that a nest whose rows do not fit into registers reads everything twice before it can go on. Where
that pattern is found, the second sum becomes the reduction ``deviations``, which needs the values only (Welford's
update inside of a kernel, Chan's between parts). What follows, such as the normalised values, is as it was.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gradsplit.compile_core.ir.loops import Apply, Constant, LoopNest, Reduce, Statement
from gradsplit.compile_core.lowering.nests.live_statements import without_dead_statements
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes


def one_walk_variances(nest: LoopNest) -> LoopNest:
    """The nest with each sum of squared differences from a mean as one reduction of the values."""
    body = [
        statement if values is None else Reduce("deviations", values, statement.dtype)  # type: ignore[union-attr]
        for statement, values in ((s, _deviating(nest, s)) for s in nest.body)
    ]
    walked = replace(nest, body=without_dead_statements(body))
    # Parts are joined with the help of their sums, which a nest without use for the mean does not have any more.
    return walked if all(_sums_beside(walked, s) for s in walked.body if _is_deviations(s)) else nest


def has_deviations(nest: LoopNest) -> bool:
    return any(_is_deviations(s) for s in nest.body)


def sum_beside(nest: LoopNest, deviations: Reduce) -> int:
    """The number of the sum of the same values, which a mean was made of."""
    return _sums_beside(nest, deviations)[0]


def _sums_beside(nest: LoopNest, deviations: Statement) -> list[int]:
    assert isinstance(deviations, Reduce)
    return [n for n, s in enumerate(nest.body) if s == replace(deviations, operation="sum")]


def _is_deviations(statement: Statement) -> bool:
    return isinstance(statement, Reduce) and statement.operation == "deviations"


def _deviating(nest: LoopNest, statement: Statement) -> int | None:
    """The values whose squared differences from their mean a statement sums up, or ``None`` if it does not."""
    if (
        not isinstance(statement, Reduce)
        or statement.operation != "sum"
        or not statement.dtype.is_floating_point
    ):
        return None
    square = nest.body[statement.argument]
    if (
        not isinstance(square, Apply)
        or square.operation != "mul"
        or square.arguments[0] != square.arguments[1]
    ):
        return None
    difference = nest.body[square.arguments[0]]
    if not isinstance(difference, Apply) or difference.operation != "sub":
        return None
    values, mean = difference.arguments
    is_mean = _mean_of(nest, mean) == Reduce("sum", values, statement.dtype)
    return values if is_mean and difference.dtype == square.dtype == statement.dtype else None


def _mean_of(nest: LoopNest, value: int) -> Statement | None:
    """The sum that a value is the mean of: over the number of points, or times its inverse."""
    mean = nest.body[value]
    if not isinstance(mean, Apply) or mean.operation not in ("mul", "div"):
        return None
    count = prod(nest.extents[parallel_axes(nest) :])
    wanted = float(count) if mean.operation == "div" else 1.0 / count
    orders = [mean.arguments] if mean.operation == "div" else [mean.arguments, mean.arguments[::-1]]
    for total, factor in orders:
        known = nest.body[factor]
        if isinstance(known, Constant) and abs(known.value - wanted) <= 1e-6 * wanted:
            return nest.body[total]
    return None
