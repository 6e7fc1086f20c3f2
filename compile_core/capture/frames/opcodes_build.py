"""Opcodes that build containers and strings, and take containers apart."""

from __future__ import annotations

import collections
from typing import Any

from gradsplit.compile_core.capture.code_objects.instructions import Instruction
from gradsplit.compile_core.capture.code_objects.python_versions import INTRINSICS_1
from gradsplit.compile_core.capture.frames.frame import Frame, opcode, value_opcodes
from gradsplit.compile_core.capture.operations import operators, texts
from gradsplit.compile_core.capture.values.base import Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, fold
from gradsplit.compile_core.capture.values.containers import ListValue, SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.mappings import DictValue, mapping_pairs, new_dict
from gradsplit.compile_core.capture.values.sets import new_set


def _change(frame: Frame, instruction: Instruction, method: str, item: Value) -> None:
    """Call a method of the container that is being built."""
    frame.stack[-instruction.arg].call_method(frame.state, method, [item], {})


@opcode("BUILD_MAP")
def _build_map(frame: Frame, instruction: Instruction) -> None:
    items = frame.pop_many(2 * instruction.arg)
    frame.push(new_dict(list(zip(items[::2], items[1::2], strict=True)), frame.state))


@opcode("BUILD_CONST_KEY_MAP")
def _build_const_key_map(frame: Frame, instruction: Instruction, keys: Value) -> Value:
    items = frame.pop_many(instruction.arg)
    return new_dict(list(zip(frame.state.items_of(keys), items, strict=True)), frame.state)


@opcode("BUILD_STRING")
def _build_string(frame: Frame, instruction: Instruction) -> None:
    frame.push(fold(frame.state, lambda *parts: "".join(parts), frame.pop_many(instruction.arg), {}))


_CONVERSIONS: dict[Any, Any] = {str: str, repr: repr, ascii: ascii, 1: str, 2: repr, 3: ascii}
_NO_SPEC = ConstantValue("")


@opcode("FORMAT_VALUE")
def _format_value(frame: Frame, instruction: Instruction) -> None:
    spec = frame.pop() if instruction.arg & 4 else _NO_SPEC
    shown = texts.converted(frame.state, frame.pop(), _CONVERSIONS.get(instruction.arg & 3))
    frame.push(texts.formatted(frame.state, shown, spec))


@opcode("DICT_UPDATE", "DICT_MERGE")
def _dict_update(frame: Frame, instruction: Instruction, source: Value) -> None:
    target = frame.stack[-instruction.arg]
    pairs = mapping_pairs(frame.state, source)
    if pairs is None:
        raise frame.state.raise_exception(
            TypeError, f"{source.python_type().__name__!r} object is not a mapping"
        )
    assert isinstance(target, DictValue)
    for key, item in pairs:
        if instruction.name == "DICT_MERGE" and key.hash_key(frame.state) in target.entries:
            shown = f"multiple values for keyword argument {key.hash_key(frame.state)!r}"
            raise frame.state.raise_exception(TypeError, shown)
        target.set_item(frame.state, key, item)


@opcode("LIST_TO_TUPLE")
def _list_to_tuple(frame: Frame, instruction: Instruction, items: Value) -> Value:
    return SequenceValue(list(frame.state.items_of(items)), tuple)


@opcode("CALL_INTRINSIC_1")
def _call_intrinsic(frame: Frame, instruction: Instruction, value: Value) -> Value:
    name = INTRINSICS_1.get(instruction.arg)
    if name == "list_to_tuple":
        return _list_to_tuple(frame, instruction, value)
    if name == "unary_positive":
        return operators.unary(frame.state, "+", value)
    if name != "stopiteration_error":
        raise frame.state.unsupported("opcode", f"no rule for the intrinsic {instruction.text}")
    return value


@opcode("UNPACK_SEQUENCE")
def _unpack_sequence(frame: Frame, instruction: Instruction) -> None:
    items = _items_to_unpack(frame, instruction.arg)
    if len(items) != instruction.arg:
        wanted = instruction.arg
        few = f"not enough values to unpack (expected {wanted}, got {len(items)})"
        many = f"too many values to unpack (expected {wanted})"
        raise frame.state.raise_exception(ValueError, few if len(items) < wanted else many)
    frame.stack.extend(reversed(items))


@opcode("UNPACK_EX")
def _unpack_ex(frame: Frame, instruction: Instruction) -> None:
    before, after = instruction.arg & 0xFF, instruction.arg >> 8
    items = _items_to_unpack(frame)
    if len(items) < before + after:
        wanted = f"at least {before + after}" if after else f"at least {before}"
        message = f"not enough values to unpack (expected {wanted}, got {len(items)})"
        raise frame.state.raise_exception(ValueError, message)
    middle = items[before : len(items) - after]
    parts: list[Value] = [*items[:before], ListValue(list(middle)), *items[len(items) - after :]]
    frame.stack.extend(reversed(parts))


def _items_to_unpack(frame: Frame, stored: int = 0) -> list[Any]:
    """The items; unread ones of a tuple stay so where the next instructions store them all, ``stored``, in variables:
    nothing of a variable that nobody reads is guarded, as of the index in ``for index, layer in enumerate(layers)``."""
    value = frame.pop()
    following = frame.code.instructions[frame.index : frame.index + stored]
    are_stored = stored > 0 and all(entry.name == "STORE_FAST" for entry in following)
    if are_stored and isinstance(value, SequenceValue) and value.cls is tuple and len(value.items) == stored:
        return list(value.items)
    if isinstance(value, DictValue) and value.cls is collections.defaultdict:
        value.guard_keys(frame.state)
    if not is_iterable(value):
        message = f"cannot unpack non-iterable {value.python_type().__name__} object"
        raise frame.state.raise_exception(TypeError, message)
    return frame.state.items_of(value)


def is_iterable(value: Value) -> bool:
    cls = value.python_type()
    return hasattr(cls, "__iter__") or hasattr(cls, "__getitem__")


value_opcodes(
    {
        "BUILD_TUPLE": lambda frame, instruction: SequenceValue(list(frame.pop_many(instruction.arg)), tuple),
        "BUILD_LIST": lambda frame, instruction: ListValue(list(frame.pop_many(instruction.arg))),
        "BUILD_SET": lambda frame, instruction: new_set(frame.state, frame.pop_many(instruction.arg)),
        "BUILD_SLICE": lambda frame, instruction: SliceValue(
            [*frame.pop_many(instruction.arg), ConstantValue(None)][:3]
        ),
        "FORMAT_SIMPLE": lambda frame, instruction, value: texts.formatted(frame.state, value, _NO_SPEC),
        "FORMAT_WITH_SPEC": lambda frame, instruction, value, spec: texts.formatted(frame.state, value, spec),
        "CONVERT_VALUE": lambda frame, instruction, value: texts.converted(
            frame.state, value, _CONVERSIONS[instruction.arg]
        ),
        "LIST_APPEND": lambda frame, instruction, item: _change(frame, instruction, "append", item),
        "LIST_EXTEND": lambda frame, instruction, items: _change(frame, instruction, "extend", items),
        "SET_ADD": lambda frame, instruction, item: _change(frame, instruction, "add", item),
        "SET_UPDATE": lambda frame, instruction, items: _change(frame, instruction, "update", items),
        "MAP_ADD": lambda frame, instruction, key, value: frame.stack[-instruction.arg].set_item(
            frame.state, key, value
        ),
    }
)
