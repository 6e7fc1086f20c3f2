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
    new_number = {old: new for new, old in enumerate(kept)}
    return tuple(renumbered(body[old], new_number) for old in kept)


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
            return replace(statement, access=regathered(access, number), value=number[value], mask=mask)
        case _:
            return statement


def regathered(access: Access, number: Mapping[int, int]) -> Access:
    """An access whose gathered values have moved."""
    return replace(access, gathers=tuple(replace(g, value=number[g.value]) for g in access.gathers))
