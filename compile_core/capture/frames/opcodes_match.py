"""Opcodes of the match statement."""

from __future__ import annotations

import collections.abc

from gradsplit.compile_core.capture.code_objects.instructions import Instruction
from gradsplit.compile_core.capture.frames.frame import Frame, opcode
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.operations.type_tests import is_instance
from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue

# Classes whose only positional pattern is the object itself.
_SELF_MATCHING = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


@opcode("MATCH_SEQUENCE")
def _match_sequence(frame: Frame, instruction: Instruction) -> None:
    cls = frame.stack[-1].python_type()
    texts = (str, bytes, bytearray)
    frame.push(ConstantValue(issubclass(cls, collections.abc.Sequence) and not issubclass(cls, texts)))


@opcode("MATCH_MAPPING")
def _match_mapping(frame: Frame, instruction: Instruction) -> None:
    frame.push(ConstantValue(issubclass(frame.stack[-1].python_type(), collections.abc.Mapping)))


@opcode("MATCH_KEYS")
def _match_keys(frame: Frame, instruction: Instruction) -> None:
    state = frame.state
    subject, keys = frame.stack[-2:]
    if not isinstance(subject, DictValue):
        raise state.unsupported("match", f"a mapping pattern for {subject.describe()}")
    found: list[Value] = []
    for key in state.items_of(keys):
        item = subject.find(state, key)
        if item is None:
            frame.push(ConstantValue(None))
            return
        found.append(item)
    frame.push(SequenceValue(list(found), tuple))


@opcode("MATCH_CLASS")
def _match_class(frame: Frame, instruction: Instruction, subject: Value, cls: Value, names: Value) -> Value:
    state = frame.state
    if not isinstance(cls, ClassValue):
        raise state.raise_exception(TypeError, "called match pattern must be a class")
    attributes = _matched_attributes(state, subject, cls, instruction.arg, names.as_constant())
    return ConstantValue(None) if attributes is None else SequenceValue(list(attributes), tuple)


def _matched_attributes(
    state: CaptureState, subject: Value, cls: ClassValue, count: int, names: tuple[str, ...]
) -> list[Value] | None:
    """The values of the sub-patterns, None where the subject does not match."""
    if not is_instance(state, subject, cls):
        return None
    found: list[Value] = []
    if count:
        try:
            fields = state.items_of(cls.get_attribute(state, "__match_args__"))
        except SymbolicRaise as raised:
            if not issubclass(raised.value.python_type(), AttributeError):
                raise
            fields = None
        matches_itself = fields is None and issubclass(cls.real, _SELF_MATCHING)
        allowed = int(matches_itself) if fields is None else len(fields)
        if count > allowed:
            message = f"{cls.real.__name__}() accepts {allowed} positional sub-patterns ({count} given)"
            raise state.raise_exception(TypeError, message)
        if matches_itself:
            found.append(subject)
        names = (*(field.as_constant() for field in (fields or ())[:count]), *names)
    for name in names:
        if not subject.has_attribute(state, name):
            return None
        found.append(subject.get_attribute(state, name))
    return found
