"""Which statements of a body are needed, and a body of those alone: all that stay get new numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gradsplit.compile_core.ir.loops import Access, Apply, Load, Reduce, Statement, Store, operands


def without_dead_statements(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """The body without values that no store depends on, renumbered."""
    live = live_statements(body)
    return only_statements(body, live)


def needed_statements(
    body: Sequence[Statement], results: Iterable[int], known: Collection[int] = ()
) -> list[int]:
    """``results`` and the statements that they depend on, down to the ``known`` ones, which are included."""
    needed = set(results)
    pending = [number for number in needed if number not in known]
    while pending:
        for operand in operands(body[pending.pop()]):
            if operand not in needed:
                needed.add(operand)
                if operand not in known:
                    pending.append(operand)
    return sorted(needed)


def live_statements(body: Sequence[Statement], results: Iterable[int] = ()) -> list[int]:
    """The statements that stores and ``results`` depend on, these included."""
    stores = (number for number, statement in enumerate(body) if isinstance(statement, Store))
    return needed_statements(body, [*results, *stores])


def only_statements(body: Sequence[Statement], kept: Sequence[int]) -> tuple[Statement, ...]:
    """The body of these statements, which need no others, renumbered."""
    if len(kept) == len(body):
        return tuple(body)
    new_number = {old: new for new, old in enumerate(kept)}
    return tuple(renumbered(body[old], new_number) for old in kept)


def renumbered(statement: Statement, number: Mapping[int, int]) -> Statement:
    """A statement whose operands have moved."""
    match statement:
        case Apply(arguments=arguments):
            moved = tuple([number[a] for a in arguments])
            return Apply(statement.operation, moved, statement.dtype, statement.parameter)
        case Reduce(argument=argument):
            return Reduce(statement.operation, number[argument], statement.dtype)
        case Load(access=access, mask=mask):
            mask = None if mask is None else number[mask]
            return Load(regathered(access, number), statement.dtype, mask, statement.other)
        case Store(access=access, value=value, mask=mask):
            mask = None if mask is None else number[mask]
            return Store(regathered(access, number), number[value], mask, statement.reduction)
        case _:
            return statement


def regathered(access: Access, number: Mapping[int, int]) -> Access:
    """An access whose gathered values have moved."""
    if not access.gathers:
        return access
    return replace(access, gathers=tuple(replace(g, value=number[g.value]) for g in access.gathers))
