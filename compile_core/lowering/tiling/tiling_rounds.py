"""One kernel per round of reductions, for a nest that would run on a few processors of a GPU.

A batch norm over 64 channels is 64 programs, each of which walks its channel several times: for the mean, for
the variance, and to normalise. Where parallel points are so few, it is faster to read the tensor anew in
kernels that use the whole GPU: each round of reductions becomes a nest of its own (which ``tiling_split.py``
then cuts further), and what follows the last round becomes a pointwise one. What later rounds need of a row, as its
mean, goes through small buffers, one element a row; the round that is the first to know it computes it, once. What a
round stores at every point a later one reads back instead of computing it again, where that takes fewer loads: a
residual gradient, say, that is a masked sum of two others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import torch

from gradsplit.compile_core.ir.loops import Access, Apply, Load, LoopNest, Reduce, Statement, Store
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.live_statements import needed_statements, renumbered
from gradsplit.compile_core.lowering.nests.order_axes import parallel_axes
from gradsplit.compile_core.lowering.nests.passes import NestAnalysis, analyse


def split_rounds(
    nest: LoopNest, buffers: Mapping[str, TensorSpec], device: torch.device
) -> tuple[tuple[LoopNest, ...], dict[str, TensorSpec]]:
    """Nests with at most one round of reductions each, in order, and the specs of the buffers between
    them; ``nest`` reads nothing that it stores."""
    analysis = analyse(nest, 0)
    rows = nest.extents[: parallel_axes(nest)]
    strides = (*(prod(rows[axis + 1 :]) for axis in range(len(rows))), *(0,) * nest.reduced_axes)
    last_walk = max(index for index, step in enumerate(analysis.passes) if step.walks)
    read_later: set[int] = set()
    bodies: list[tuple[Statement, ...]] = []
    for index in reversed(range(last_walk + 1)):
        step = analysis.passes[index]
        due = {n for n in read_later if max(1, analysis.levels[n]) == index + 1}
        sinks = {*step.reduces, *step.stores, *due, *_row_stores(analysis, index, index == last_walk)}
        places = {
            n: Access(_result(nest, n), strides)
            for n, statement in enumerate(nest.body)
            if isinstance(statement, Apply | Reduce)
            and not analysis.walks_with(n)
            and max(1, analysis.levels[n]) <= index
        }
        stored = _stored_values(analysis, [n for p in analysis.passes[:index] for n in p.stores], buffers)
        places |= {n: stored[n] for n in _worth_reading(analysis, sinks, set(places), stored)}
        wanted = needed_statements(nest.body, sinks, places)
        bodies.append(_body(nest, wanted, places, {n: Access(_result(nest, n), strides) for n in due}))
        read_later |= {n for n in wanted if n in places and n not in stored}
    nests: list[LoopNest] = []
    for index, body in enumerate(reversed(bodies)):
        reduced = nest.reduced_axes if any(isinstance(s, Reduce) for s in body) else 0
        nests.append(LoopNest(f"{nest.name}_round_{index}", nest.extents, reduced, body, nest.origins))
    specs = {}
    for n in sorted(read_later):
        dtype = nest.body[n].dtype  # type: ignore[union-attr]
        specs[_result(nest, n)] = TensorSpec.contiguous(rows, dtype, device)
    nests[-1] = replace(nests[-1], name=nest.name)
    return tuple(nests), specs


def _result(nest: LoopNest, value: int) -> str:
    return f"{nest.name}_result_{value}"


def _row_stores(analysis: NestAnalysis, index: int, is_last: bool) -> list[int]:
    """The stores that happen once a row, of what a round is the first to know."""
    return [
        n
        for n, s in enumerate(analysis.nest.body)
        if isinstance(s, Store)
        and not analysis.walks_with(n)
        and (max(1, analysis.levels[n]) == index + 1 or (is_last and analysis.levels[n] > index))
    ]


def has_several_rounds(analysis: NestAnalysis) -> bool:
    """Whether something that happens at every point, or a reduction, needs the result of a reduction."""
    return sum(step.walks for step in analysis.passes) > 1


def _stored_values(
    analysis: NestAnalysis, stores: Iterable[int], buffers: Mapping[str, TensorSpec]
) -> dict[int, Access]:
    """The values that lie in memory once these stores happened, as precisely as a load yields them."""
    body = analysis.nest.body
    targets = [s.access.buffer for s in body if isinstance(s, Store)]
    values: dict[int, Access] = {}
    for n in stores:
        store = body[n]
        assert isinstance(store, Store)
        if store.mask is not None or store.reduction is not None or store.access.gathers:
            continue
        if targets.count(store.access.buffer) > 1:
            continue
        dtype = buffers[store.access.buffer].dtype
        for value, statement in enumerate(body):
            if not isinstance(statement, Apply) or statement.operation != "round_to":
                continue
            if statement.arguments == (store.value,) and statement.parameter == dtype:
                values[value] = store.access
        if body[store.value].dtype == dtype:  # type: ignore[union-attr]
            values[store.value] = store.access
    return values


def _worth_reading(
    analysis: NestAnalysis, sinks: Iterable[int], passed: set[int], in_memory: Mapping[int, Access]
) -> set[int]:
    """The values in memory which, when read, save other loads at every point."""
    worth: set[int] = set()

    def loads(known: set[int]) -> int:
        wanted = needed_statements(analysis.nest.body, sinks, known)
        body = analysis.nest.body
        return sum(analysis.walks_with(n) and (n in worth or isinstance(body[n], Load)) for n in wanted)

    for value in sorted(in_memory, reverse=True):
        before = loads(passed | worth)
        worth.add(value)
        if loads(passed | worth) >= before:
            worth.discard(value)
    return worth


def _body(
    nest: LoopNest, wanted: list[int], places: Mapping[int, Access], kept: Mapping[int, Access]
) -> tuple[Statement, ...]:
    """The ``wanted`` statements: those with places are loaded from there, those to be kept are also stored."""
    body: list[Statement] = []
    number: dict[int, int] = {}
    for n in wanted:
        statement = nest.body[n]
        if n in places:
            body.append(Load(places[n], statement.dtype))  # type: ignore[union-attr]
        else:
            body.append(renumbered(statement, number))
        number[n] = len(body) - 1
        if n in kept:
            body.append(Store(kept[n], number[n]))
    return tuple(body)
