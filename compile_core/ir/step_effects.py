"""Which buffers a step of a loop program reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradsplit.compile_core.ir.loops import (
    AttentionNest,
    BandNest,
    ExternCall,
    Load,
    LoopNest,
    NestBatch,
    ProductNest,
    Step,
    Store,
    View,
)


def views_in(argument: Any) -> Iterator[View]:
    """The views among (nested) arguments of an extern call."""
    if isinstance(argument, View):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from views_in(part)
    elif isinstance(argument, dict):
        for part in argument.values():
            yield from views_in(part)


def reads(step: Step) -> frozenset[str]:
    """Buffers that a step reads, or adds to. Arguments of an extern call all count, those that it overwrites too."""
    if isinstance(step, LoopNest):
        return step.buffers_read
    if isinstance(step, ProductNest):
        return (reads(step.epilogue) - {step.product}) | {step.left.buffer, step.right.buffer}
    if isinstance(step, AttentionNest):
        given = {view.buffer for view in (*step.operands, *step.lists)}
        return (reads(step.body.nest) - {step.body.score, step.body.arriving}) | given
    if isinstance(step, NestBatch):
        return frozenset[str]().union(*map(reads, step.members))
    if isinstance(step, BandNest):
        return reads(step.rows)
    return frozenset(view.buffer for view in views_in([step.arguments, dict(step.keywords)]))


def writes(step: Step) -> frozenset[str]:
    """Buffers that a step defines, fills (partly) or mutates."""
    if isinstance(step, LoopNest):
        return step.buffers_written
    if isinstance(step, ProductNest):
        return writes(step.epilogue)
    if isinstance(step, AttentionNest):
        return frozenset(view.buffer for view in step.results if view is not None)
    if isinstance(step, NestBatch):
        return frozenset[str]().union(*map(writes, step.members))
    if isinstance(step, BandNest):
        return writes(step.rows).union(name for _, name in step.sums)
    named = {name for name in step.outputs if name is not None}
    named.update(view.buffer for view in step.out.values())
    named.update(mutated(step))
    return frozenset(named)


def mutated(step: Step) -> frozenset[str]:
    """Buffers that an extern call changes although they are among its arguments and not its ``out``."""
    if not isinstance(step, ExternCall):
        return frozenset()
    names: set[str] = set()
    schema = step.target._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(step.arguments):
            names.update(view.buffer for view in views_in(step.arguments[position]))
        elif argument.name in step.keywords:
            names.update(view.buffer for view in views_in(step.keywords[argument.name]))
    return frozenset(names)


def only_store(nest: LoopNest, new: str, old: str) -> Store | None:
    """The single store of a nest into ``new``, under no condition.

    None if the nest reads anything of ``old`` later, or elsewhere in its buffer than it stores.
    """
    stores = [(n, s) for n, s in enumerate(nest.body) if isinstance(s, Store) and s.access.buffer == new]
    if len(stores) != 1 or stores[0][1].mask is not None:
        return None
    ((place, store),) = stores
    same = replace(store.access, buffer=old)
    loads = [(n, s.access) for n, s in enumerate(nest.body) if isinstance(s, Load) and s.access.buffer == old]
    return store if all(n < place and access == same for n, access in loads) else None
