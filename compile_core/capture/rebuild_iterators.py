"""Real iterators in the state that symbolic ones have reached."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.capture.values.base import Value
from gradsplit.compile_core.capture.values.constants import SequenceIterator
from gradsplit.compile_core.capture.values.iterators import (
    ChainIterator,
    CountIterator,
    RealIterator,
    SliceIterator,
)
from gradsplit.compile_core.capture.values.mappings import DictIterator


def build_iterator(writer: Any, value: Value) -> str:
    """An expression that makes the iterator; ``writer`` is the RunnerWriter."""

    def make(callee: Any, *texts: str) -> str:
        return f"{writer.constant(callee)}({', '.join(texts)})"

    def emit_all(values: list[Value]) -> list[str]:
        return [writer.emit(item) for item in values]

    if isinstance(value, DictIterator):
        return _dict_iterator(writer, value)
    if isinstance(value, SequenceIterator):
        return _sequence_iterator(writer, value)
    if isinstance(value, RealIterator) and value.cls in (zip, map, filter, enumerate):
        parts, keywords = value.parts()
        shown = [writer.emit(part) if isinstance(part, Value) else repr(part) for part in parts]
        return make(value.cls, *shown, *(f"{key}={item}" for key, item in keywords.items()))
    if isinstance(value, CountIterator):
        return make(value.cls, writer.constant(value.value), writer.constant(value.step))
    if isinstance(value, ChainIterator):
        current = [] if value.current is None else [value.current]
        return make(value.cls, *emit_all([*current, *value.iterables]))
    if isinstance(value, SliceIterator):
        left = None if value.stop is None else value.stop - value.passed
        return make(
            value.cls, writer.emit(value.iterator), f"{value.next - value.passed}, {left}, {value.step}"
        )
    if isinstance(value, RealIterator) and value.is_closed:
        rest = "".join(f"{writer.emit(item)}, " for item in value.rest())
        return f"iter(({rest}))"
    raise value_cannot_be_rebuilt(writer, value)


def _sequence_iterator(writer: Any, value: SequenceIterator) -> str:
    if value.live_list is None:
        rest = "".join(f"{writer.emit(item)}, " for item in value.items[value.index :])
        return f"iter(({rest}))"
    name = writer.bind(f"iter({writer.emit(value.live_list)})")
    # The list may be longer once the effects are stored, and the position is cut off at its end.
    writer.late.append(f"{name}.__setstate__({value.index})")
    return name


def _dict_iterator(writer: Any, value: DictIterator) -> str:
    if id(value.owner) in writer.state.effects.containers or value.owner.cls is not dict:
        raise value_cannot_be_rebuilt(writer, value)
    if not value.items:
        return "iter(())"
    name = writer.bind(f"iter({writer.emit(value.owner)}.{value.what}())")
    if value.index:
        writer.lines.append(f"for _ in range({value.index}): next({name})")
    return name


def value_cannot_be_rebuilt(writer: Any, value: Value) -> Exception:
    kind = value.python_type().__name__
    return writer.state.unsupported("live-iterator", f"a {kind} that has begun and cannot be made anew")
