"""One kernel per round of reductions, for a nest that would run on a few processors of a GPU.

A batch norm over 64 channels is 64 programs, each of which walks its channel several times: for the mean, for
the variance, and to normalise. Where parallel points are so few, it is faster to read the tensor anew in
kernels that use the whole GPU: each round of reductions becomes a nest of its own (which ``tiling_split.py``
then cuts further), and what follows the last round becomes a pointwise one. Results of a round go through
small buffers, one element a row. What a round stores at every point a later one reads back instead of computing it
again, where that takes fewer loads: a residual gradient, say, that is a masked sum of two others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import torch

from compile_core.ir.loops import Access, Apply, Load, LoopNest, Reduce, Statement, Store, operands
from compile_core.ir.tensor_spec import TensorSpec
from compile_core.lowering.passes import NestAnalysis, analyse
from compile_core.lowering.tiling_axes import parallel_axes


def split_rounds(
    nest: LoopNest, buffers: Mapping[str, TensorSpec], device: torch.device
) -> tuple[tuple[LoopNest, ...], dict[str, TensorSpec]]:
    """Nests with at most one round of reductions each, in order, and the specs of the buffers between
    them; ``nest`` reads nothing that it stores."""
    analysis = analyse(nest, 0)
    rows = nest.extents[: parallel_axes(nest)]
    strides = (*(prod(rows[axis + 1 :]) for axis in range(len(rows))), *(0,) * nest.reduced_axes)
    results = {n: f"{nest.name}_result_{n}" for n, s in enumerate(nest.body) if isinstance(s, Reduce)}
    row_stores = [n for n, s in enumerate(nest.body) if isinstance(s, Store) and not analysis.walks_with(n)]
    nests: list[LoopNest] = []
    passed: set[int] = set()
    read_later: set[int] = set()
    in_memory: dict[int, Access] = {}
    bodies: list[tuple[list[int], Mapping[int, Access]]] = []
    last_walk = max(index for index, step in enumerate(analysis.passes) if step.walks)
    for index, step in enumerate(analysis.passes[: last_walk + 1]):
        due = [n for n in row_stores if max(1, analysis.levels[n]) == index + 1]
        if index == last_walk:
            due = [n for n in row_stores if max(1, analysis.levels[n]) >= index + 1]
        sinks = {*step.reduces, *step.stores, *due}
        known = passed | _worth_reading(analysis, sinks, passed, in_memory)
        places = {n: Access(results[n], strides) if n in passed else in_memory[n] for n in known}
        bodies.append((_closure(nest, sinks, known), places))
        read_later |= set(bodies[-1][0]) & passed
        passed |= set(step.reduces)
        in_memory |= _stored_values(analysis, step.stores, buffers)
    for index, (wanted, places) in enumerate(bodies):
        kept = {n: Access(results[n], strides) for n in wanted if n in read_later and n not in places}
        body = _body(nest, wanted, places, kept)
        reduced = nest.reduced_axes if any(isinstance(s, Reduce) for s in body) else 0
        nests.append(LoopNest(f"{nest.name}_round_{index}", nest.extents, reduced, body, nest.origins))
    specs = {}
    for n in read_later:
        dtype = nest.body[n].dtype  # type: ignore[union-attr]
        specs[results[n]] = TensorSpec.contiguous(rows, dtype, device)
    nests[-1] = replace(nests[-1], name=nest.name)
    return tuple(nests), specs


def has_several_rounds(analysis: NestAnalysis) -> bool:
    """Whether something that happens at every point, or a reduction, needs the result of a reduction."""
    return sum(step.walks for step in analysis.passes) > 1


def _closure(nest: LoopNest, sinks: Iterable[int], known: set[int]) -> list[int]:
    """The statements that ``sinks`` need, down to the results in ``known``, which are included."""
    wanted = set(sinks)
    pending = list(wanted)
    while pending:
        for operand in operands(nest.body[pending.pop()]):
            if operand not in wanted:
                wanted.add(operand)
                if operand not in known:
                    pending.append(operand)
    return sorted(wanted)


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
        if store.mask is not None or store.access.gathers or targets.count(store.access.buffer) > 1:
            continue
        dtype = buffers[store.access.buffer].dtype
        for value, statement in enumerate(body):
            is_rounded = isinstance(statement, Apply) and statement.operation == "round_to"
            if is_rounded and statement.arguments == (store.value,) and statement.parameter == dtype:
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
        wanted = _closure(analysis.nest, sinks, known)
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


def renumbered(statement: Statement, number: Mapping[int, int]) -> Statement:
    """A statement whose operands have moved."""
    match statement:
        case Apply(arguments=arguments):
            return replace(statement, arguments=tuple(number[a] for a in arguments))
        case Reduce(argument=argument):
            return replace(statement, argument=number[argument])
        case Load(access=access, mask=mask):
            mask = None if mask is None else number[mask]
            return replace(statement, access=regathered(access, number), mask=mask)
        case Store(access=access, value=value, mask=mask):
            mask = None if mask is None else number[mask]
            return Store(regathered(access, number), number[value], mask)
        case _:
            return statement


def regathered(access: Access, number: Mapping[int, int]) -> Access:
    """An access whose gathered values have moved."""
    return replace(access, gathers=tuple(replace(g, value=number[g.value]) for g in access.gathers))
