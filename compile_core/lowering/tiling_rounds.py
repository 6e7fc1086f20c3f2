"""One kernel per round of reductions, for a nest that would run on a few processors of a GPU.

A batch norm over 64 channels is 64 programs, each of which walks its channel several times: for the mean, for
the variance, and to normalise. Where parallel points are so few, it is faster to read the tensor anew in
kernels that use the whole GPU: each round of reductions becomes a nest of its own (which ``tiling_split.py``
then cuts further), and what follows the last round becomes a pointwise one. Results of a round go through
small buffers, one element a row.
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


def split_rounds(nest: LoopNest, device: torch.device) -> tuple[tuple[LoopNest, ...], dict[str, TensorSpec]]:
    """Nests with at most one round of reductions each, in order, and the specs of the buffers between
    them."""
    analysis = analyse(nest, 0)
    rows = nest.extents[: parallel_axes(nest)]
    results = {n: f"{nest.name}_result_{n}" for n, s in enumerate(nest.body) if isinstance(s, Reduce)}
    row_stores = [n for n, s in enumerate(nest.body) if isinstance(s, Store) and not analysis.walks_with(n)]
    nests: list[LoopNest] = []
    passed: set[int] = set()
    read_later: set[int] = set()
    bodies: list[tuple[list[int], set[int]]] = []
    last_walk = max(index for index, step in enumerate(analysis.passes) if step.walks)
    for index, step in enumerate(analysis.passes[: last_walk + 1]):
        due = [n for n in row_stores if max(1, analysis.levels[n]) == index + 1]
        if index == last_walk:
            due = [n for n in row_stores if max(1, analysis.levels[n]) >= index + 1]
        sinks = {*step.reduces, *step.stores, *due}
        bodies.append((_closure(nest, sinks, passed), set(passed)))
        read_later |= set(bodies[-1][0]) & passed
        passed |= set(step.reduces)
    for index, (wanted, before) in enumerate(bodies):
        body = _body(nest, wanted, before, read_later, results)
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


def _body(
    nest: LoopNest, wanted: list[int], known: set[int], read_later: set[int], results: Mapping[int, str]
) -> tuple[Statement, ...]:
    parallel = parallel_axes(nest)
    rows = nest.extents[:parallel]
    strides = (*(prod(rows[axis + 1 :]) for axis in range(parallel)), *(0,) * nest.reduced_axes)
    body: list[Statement] = []
    number: dict[int, int] = {}
    for n in wanted:
        statement = nest.body[n]
        if n in known:
            body.append(Load(Access(results[n], strides), statement.dtype))  # type: ignore[union-attr]
        else:
            body.append(renumbered(statement, number))
        number[n] = len(body) - 1
        if n in read_later and n not in known:
            body.append(Store(Access(results[n], strides), number[n]))
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
