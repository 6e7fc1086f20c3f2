"""Numbers that a program draws from ``random.Random`` or ``numpy.random.Generator``.

A copy of the generator tells what it is about to give, at the capture and in each check, as one of a live iterator
does; the generator itself draws when the graph has run, with the other effects. A float is an input of the graph. What
a drawn number decides is a guard, so each outcome makes an entry of its own: there are few, as a loop over layers that
are dropped at random would have one for each of their combinations, where pieces between breaks are shared.

NumPy's ``RandomState`` ends the graph: a copy of one takes longer than the break.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradsplit.compile_core.capture.open_numbers.symbolic_numbers import FloatInput
from gradsplit.compile_core.capture.python_rules.drawn_tensors import (
    DefaultGenerator,
    TensorGenerator,
    is_of_torch,
)
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value, constants_of
from gradsplit.compile_core.capture.values.constants import BuiltinMethod, is_literal
from gradsplit.compile_core.capture.values.references import ReferenceValue
from gradsplit.compile_core.ir.sources import ConvertedSource, ItemSource, Reference, Source

GENERATORS = (random.Random, np.random.Generator)
_MOST_DECISIONS = 3

# The calls of methods of one generator: name and arguments.
_Calls = list[tuple[str, Sequence[Any], dict[str, Any]]]


def _copy_of(generator: Any) -> Any:
    if type(generator) is random.Random:
        made = random.Random.__new__(random.Random)
        made.setstate(generator.getstate())
        return made
    bits = type(generator.bit_generator)(0)
    bits.state = generator.bit_generator.state
    return np.random.Generator(bits)


class _Ahead:
    """What a generator is about to give to these calls."""

    def __init__(self, calls: _Calls, generator: Any) -> None:
        self._calls = calls
        self._copy = _copy_of(generator)
        self._given: list[Any] = []

    def __getitem__(self, place: int) -> Any:
        while len(self._given) <= place:
            self._given.append(_draw(self._copy, *self._calls[len(self._given)]))
        return self._given[place]


def _draw(generator: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return getattr(generator, name)(*args, **kwargs)


def _draw_all(calls: _Calls, generator: Any) -> None:
    for call in calls:
        _draw(generator, *call)


class NumberGenerator(ReferenceValue):
    """An existing generator of random numbers."""

    source: Source

    def __init__(self, state: CaptureState, real: Any, source: Source | None) -> None:
        super().__init__(real, source or state.reference_source(type(real).__name__, real))
        state.guards.type_is(source, type(real))
        self._calls: _Calls = []
        self._ahead = ConvertedSource(self.source, Reference("ahead", functools.partial(_Ahead, self._calls)))

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        method = callable(getattr(type(self.real), name, None)) and name != "__class__"
        return BuiltinMethod(self, name) if method else super().get_attribute(state, name)

    def call_method(
        self, state: CaptureState, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        function = getattr(type(self.real), name, None)
        try:
            call = (
                name,
                constants_of(args),
                dict(zip(kwargs, constants_of([*kwargs.values()]), strict=True)),
            )
            plain = all(map(is_literal, (*call[1], *call[2].values())))
        except NotConstant:
            call, plain = (name, [], {}), False
        if not plain and isinstance(function, types.FunctionType):
            return state.wrap_trusted_function(function).call(state, [self, *args], kwargs)
        try:
            given = _Ahead([*self._calls, call], self.real)[len(self._calls)] if plain else self
        except Exception:
            given = self
        if not is_literal(given):
            explanation = f"what {name!r} of {self.describe()} gives is no number, or too much for each check"
            hint = "draw single numbers, or before the compiled function"
            raise state.unsupported("random-draw", explanation, hint)
        source = ItemSource(self._ahead, len(self._calls))
        if type(given) is not float and given is not None:
            _decide(state, source)
            state.sizes.history.note_differs(source)
        self._note(state, call)
        return DrawnFloat(state, source, given) if type(given) is float else state.wrap(given, source)

    def _note(self, state: CaptureState, call: Any) -> None:
        if not self._calls:
            for other in state.effects.moved.values():
                if type(other) is NumberGenerator:
                    state.guards.distinct(self.source, other.source)
            state.effects.moved_on(self)
        self._calls.append(call)

    def move(self, writer: Any) -> str:
        return f"{writer.constant(functools.partial(_draw_all, self._calls))}({writer.emit(self)})"


class DrawnFloat(FloatInput):
    """A float that a generator gives, which differs at every call."""

    def __init__(self, state: CaptureState, source: Source, number: float) -> None:
        super().__init__(state, source, number, never_stays=True)

    def sources(self, state: CaptureState) -> list[Source]:
        _decide(state, self.source)
        return super().sources(state)


def _decide(state: CaptureState, drawn: Source) -> None:
    """A number that was drawn is about to decide what the program does."""
    decisions = state.decisions_by_draws
    if drawn in decisions:
        return
    place = tuple((frame.place()[0], frame.current) for frame in state.frames)
    if state.is_continuation or place in decisions.values() or len(decisions) >= _MOST_DECISIONS:
        raise state.unsupported(
            "random-decision",
            "a random number decides what the program does, in a loop, behind a graph break, or after others",
            "use torch.where with numbers that torch draws, or draw before the compiled function",
        )
    decisions[drawn] = place


def wrap_generator(state: CaptureState, real: Any, source: Source | None) -> Value | None:
    """The value of an existing generator; None for other objects."""
    if type(real) is torch.Generator:
        if not is_of_torch(real):
            return TensorGenerator(state, real, source or state.reference_source("generator", real))
        state.guards.is_object(source, real)
        return DefaultGenerator(real, source) if real is torch.default_generator else None
    return NumberGenerator(state, real, source) if type(real) in GENERATORS else None
