"""Opcodes that move, build and take apart data."""

from __future__ import annotations

import collections
from typing import Any

from compile_core.capture import operators
from compile_core.capture.base import NULL, Value
from compile_core.capture.constants import ConstantValue, fold
from compile_core.capture.containers import ListValue, SequenceValue, SliceValue
from compile_core.capture.exceptions import ExceptionValue
from compile_core.capture.frame import Frame, opcode
from compile_core.capture.functions import CellValue
from compile_core.capture.instructions import Instruction
from compile_core.capture.libraries import is_library_name
from compile_core.capture.mappings import DictValue, SetValue, mapping_pairs, new_dict
from compile_core.capture.python_versions import (
    INTRINSICS_1,
    LOAD_ATTR_HAS_METHOD_BIT,
    NO_EFFECT,
    NULL_IS_ABOVE_CALLABLE,
)
from compile_core.capture.tensors import TensorValue
from compile_core.ir.sources import GlobalSource


@opcode(*sorted(NO_EFFECT))
def _nothing(frame: Frame, instruction: Instruction) -> None:
    pass


@opcode("POP_TOP")
def _pop_top(frame: Frame, instruction: Instruction) -> None:
    frame.pop()


@opcode("PUSH_NULL")
def _push_null(frame: Frame, instruction: Instruction) -> None:
    frame.push(NULL)


@opcode("COPY")
def _copy(frame: Frame, instruction: Instruction) -> None:
    frame.push(frame.stack[-instruction.arg])


@opcode("SWAP")
def _swap(frame: Frame, instruction: Instruction) -> None:
    stack, depth = frame.stack, instruction.arg
    stack[-1], stack[-depth] = stack[-depth], stack[-1]


@opcode("LOAD_CONST")
def _load_const(frame: Frame, instruction: Instruction) -> None:
    frame.push(frame.state.from_constant(instruction.value))


def load_local(frame: Frame, name: str) -> Value:
    if name in frame.cells:
        # LOAD_FAST of a cell variable occurs in comprehensions that were inlined, for the cell itself.
        return frame.cells[name]
    value = frame.locals.get(name)
    if value is None or value is NULL:
        raise frame.state.raise_exception(UnboundLocalError, f"local variable {name!r} is not set")
    realized = frame.locals[name] = frame.state.realize(value)
    return realized


def store_local(frame: Frame, name: str, value: Value) -> None:
    if name in frame.cells:
        if not isinstance(value, CellValue) and value is not NULL:
            raise frame.state.unsupported("cell-store", f"a plain store to the cell variable {name!r}")
        frame.cells[name] = value if isinstance(value, CellValue) else CellValue(None)
        return
    frame.locals[name] = value
    if isinstance(value, TensorValue):
        frame.state.graph.name_after(value.node, name)


@opcode("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def _load_fast(frame: Frame, instruction: Instruction) -> None:
    frame.push(load_local(frame, instruction.value))


@opcode("LOAD_FAST_LOAD_FAST")
def _load_fast_load_fast(frame: Frame, instruction: Instruction) -> None:
    for name in instruction.value:
        frame.push(load_local(frame, name))


@opcode("LOAD_FAST_AND_CLEAR")
def _load_fast_and_clear(frame: Frame, instruction: Instruction) -> None:
    name = instruction.value
    if name in frame.cells:
        frame.push(frame.cells[name])
        frame.cells[name] = CellValue(None)
    else:
        frame.push(frame.locals.pop(name, NULL))


@opcode("MAKE_CELL")
def _make_cell(frame: Frame, instruction: Instruction) -> None:
    # At the start of a function the frame made the cells already; an inlined comprehension makes fresh ones.
    if frame.steps > len(frame.code.code.co_cellvars) + 1:
        frame.cells[instruction.value] = CellValue(None)


@opcode("STORE_FAST", "STORE_FAST_MAYBE_NULL")
def _store_fast(frame: Frame, instruction: Instruction) -> None:
    store_local(frame, instruction.value, frame.pop())


@opcode("STORE_FAST_LOAD_FAST")
def _store_fast_load_fast(frame: Frame, instruction: Instruction) -> None:
    stored, loaded = instruction.value
    store_local(frame, stored, frame.pop())
    frame.push(load_local(frame, loaded))


@opcode("STORE_FAST_STORE_FAST")
def _store_fast_store_fast(frame: Frame, instruction: Instruction) -> None:
    for name in instruction.value:
        store_local(frame, name, frame.pop())


@opcode("DELETE_FAST")
def _delete_fast(frame: Frame, instruction: Instruction) -> None:
    load_local(frame, instruction.value)
    del frame.locals[instruction.value]


@opcode("LOAD_DEREF")
def _load_deref(frame: Frame, instruction: Instruction) -> None:
    cell = frame.cells[instruction.value]
    if cell.content is None:
        raise frame.state.raise_exception(NameError, f"free variable {instruction.value!r} is not set")
    cell.content = frame.state.realize(cell.content)
    frame.push(cell.content)


@opcode("STORE_DEREF")
def _store_deref(frame: Frame, instruction: Instruction) -> None:
    frame.cells[instruction.value].store(frame.state, frame.pop())


@opcode("DELETE_DEREF")
def _delete_deref(frame: Frame, instruction: Instruction) -> None:
    frame.cells[instruction.value].store(frame.state, None)


def load_global(frame: Frame, name: str) -> Value:
    state, scope = frame.state, frame.function.scope
    library = is_library_name(scope.get("__name__"))
    stored = state.effects.stored_global(scope, name)
    if stored is not None:
        return stored
    if name in scope:
        if library:
            return state.wrap(scope[name], None)
        return state.wrap(scope[name], GlobalSource(state.reference("globals", scope), name))
    builtins = scope.get("__builtins__", {})
    names = builtins if isinstance(builtins, dict) else vars(builtins)
    if name not in names:
        raise state.raise_exception(NameError, f"name {name!r} is not defined")
    if not library:
        state.guards.absent(state.reference_source("globals", scope), name)
    return state.wrap(names[name], None)


@opcode("LOAD_GLOBAL")
def _load_global(frame: Frame, instruction: Instruction) -> None:
    value = load_global(frame, instruction.value)
    if instruction.arg & 1 and not NULL_IS_ABOVE_CALLABLE:
        frame.push(NULL)
    frame.push(value)
    if instruction.arg & 1 and NULL_IS_ABOVE_CALLABLE:
        frame.push(NULL)


@opcode("STORE_GLOBAL")
def _store_global(frame: Frame, instruction: Instruction) -> None:
    frame.state.effects.global_changed(frame.function.scope, instruction.value, frame.pop())


@opcode("LOAD_ATTR")
def _load_attr(frame: Frame, instruction: Instruction) -> None:
    if LOAD_ATTR_HAS_METHOD_BIT and instruction.arg & 1:
        _load_method(frame, instruction)
    else:
        frame.push(frame.pop().get_attribute(frame.state, instruction.value))


@opcode("LOAD_METHOD")
def _load_method(frame: Frame, instruction: Instruction) -> None:
    # The attribute is bound here already, so the place of self stays NULL.
    method = frame.pop().get_attribute(frame.state, instruction.value)
    push_callable(frame, method)


def push_callable(frame: Frame, value: Value) -> None:
    pair = [value, NULL] if NULL_IS_ABOVE_CALLABLE else [NULL, value]
    frame.stack.extend(pair)


@opcode("STORE_ATTR")
def _store_attr(frame: Frame, instruction: Instruction) -> None:
    value, owner = frame.pop_many(2)
    owner.set_attribute(frame.state, instruction.value, value)


@opcode("DELETE_ATTR")
def _delete_attr(frame: Frame, instruction: Instruction) -> None:
    frame.pop().delete_attribute(frame.state, instruction.value)


@opcode("BINARY_SUBSCR")
def _binary_subscr(frame: Frame, instruction: Instruction) -> None:
    owner, key = frame.pop_many(2)
    frame.push(owner.get_item(frame.state, key))


@opcode("STORE_SUBSCR")
def _store_subscr(frame: Frame, instruction: Instruction) -> None:
    value, owner, key = frame.pop_many(3)
    owner.set_item(frame.state, key, value)


@opcode("DELETE_SUBSCR")
def _delete_subscr(frame: Frame, instruction: Instruction) -> None:
    owner, key = frame.pop_many(2)
    owner.delete_item(frame.state, key)


@opcode("BINARY_SLICE")
def _binary_slice(frame: Frame, instruction: Instruction) -> None:
    owner, start, stop = frame.pop_many(3)
    frame.push(owner.get_item(frame.state, SliceValue([start, stop, ConstantValue(None)])))


@opcode("STORE_SLICE")
def _store_slice(frame: Frame, instruction: Instruction) -> None:
    value, owner, start, stop = frame.pop_many(4)
    owner.set_item(frame.state, SliceValue([start, stop, ConstantValue(None)]), value)


@opcode("BUILD_SLICE")
def _build_slice(frame: Frame, instruction: Instruction) -> None:
    parts = frame.pop_many(instruction.arg)
    frame.push(SliceValue([*parts, ConstantValue(None)][:3]))


@opcode("BUILD_TUPLE")
def _build_tuple(frame: Frame, instruction: Instruction) -> None:
    frame.push(SequenceValue(list(frame.pop_many(instruction.arg)), tuple))


@opcode("BUILD_LIST")
def _build_list(frame: Frame, instruction: Instruction) -> None:
    frame.push(ListValue(list(frame.pop_many(instruction.arg))))


@opcode("BUILD_SET")
def _build_set(frame: Frame, instruction: Instruction) -> None:
    made = SetValue({})
    for item in frame.pop_many(instruction.arg):
        made.add(frame.state, item)
    frame.push(made)


@opcode("BUILD_MAP")
def _build_map(frame: Frame, instruction: Instruction) -> None:
    items = frame.pop_many(2 * instruction.arg)
    frame.push(new_dict(list(zip(items[::2], items[1::2], strict=True)), frame.state))


@opcode("BUILD_CONST_KEY_MAP")
def _build_const_key_map(frame: Frame, instruction: Instruction) -> None:
    keys = frame.pop()
    items = frame.pop_many(instruction.arg)
    pairs = list(zip(frame.state.items_of(keys), items, strict=True))
    frame.push(new_dict(pairs, frame.state))


@opcode("BUILD_STRING")
def _build_string(frame: Frame, instruction: Instruction) -> None:
    frame.push(fold(frame.state, lambda *parts: "".join(parts), frame.pop_many(instruction.arg), {}))


_CONVERSIONS: dict[Any, Any] = {str: str, repr: repr, ascii: ascii, 1: str, 2: repr, 3: ascii}


def _format(frame: Frame, value: Value, conversion: Any, spec: Value | None) -> None:
    arguments = [value] if spec is None else [value, spec]
    if (
        isinstance(value, ExceptionValue)
        and len(value.args) == 1
        and spec is None
        and conversion in (None, str)
    ):
        arguments = [value.args[0]]

    def render(real: Any, spec_text: str = "") -> str:
        return format(conversion(real) if conversion is not None else real, spec_text)

    frame.push(fold(frame.state, render, arguments, {}))


@opcode("FORMAT_VALUE")
def _format_value(frame: Frame, instruction: Instruction) -> None:
    spec = frame.pop() if instruction.arg & 4 else None
    _format(frame, frame.pop(), _CONVERSIONS.get(instruction.arg & 3), spec)


@opcode("FORMAT_SIMPLE")
def _format_simple(frame: Frame, instruction: Instruction) -> None:
    _format(frame, frame.pop(), None, None)


@opcode("FORMAT_WITH_SPEC")
def _format_with_spec(frame: Frame, instruction: Instruction) -> None:
    value, spec = frame.pop_many(2)
    _format(frame, value, None, spec)


@opcode("CONVERT_VALUE")
def _convert_value(frame: Frame, instruction: Instruction) -> None:
    _format(frame, frame.pop(), _CONVERSIONS[instruction.arg], None)


@opcode("LIST_APPEND")
def _list_append(frame: Frame, instruction: Instruction) -> None:
    item = frame.pop()
    target = frame.stack[-instruction.arg]
    assert isinstance(target, ListValue)
    target.append(frame.state, item)


@opcode("LIST_EXTEND")
def _list_extend(frame: Frame, instruction: Instruction) -> None:
    items = frame.pop()
    target = frame.stack[-instruction.arg]
    assert isinstance(target, ListValue)
    target.extend(frame.state, items)


@opcode("SET_ADD")
def _set_add(frame: Frame, instruction: Instruction) -> None:
    item = frame.pop()
    target = frame.stack[-instruction.arg]
    assert isinstance(target, SetValue)
    target.add(frame.state, item)


@opcode("SET_UPDATE")
def _set_update(frame: Frame, instruction: Instruction) -> None:
    items = frame.pop()
    target = frame.stack[-instruction.arg]
    assert isinstance(target, SetValue)
    members = list(items.members.values()) if isinstance(items, SetValue) else frame.state.items_of(items)
    for item in members:
        target.add(frame.state, item)


@opcode("MAP_ADD")
def _map_add(frame: Frame, instruction: Instruction) -> None:
    key, value = frame.pop_many(2)
    frame.stack[-instruction.arg].set_item(frame.state, key, value)


@opcode("DICT_UPDATE", "DICT_MERGE")
def _dict_update(frame: Frame, instruction: Instruction) -> None:
    source = frame.pop()
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
def _list_to_tuple(frame: Frame, instruction: Instruction) -> None:
    frame.push(SequenceValue(list(frame.state.items_of(frame.pop())), tuple))


@opcode("CALL_INTRINSIC_1")
def _call_intrinsic(frame: Frame, instruction: Instruction) -> None:
    name = INTRINSICS_1.get(instruction.arg)
    if name == "list_to_tuple":
        _list_to_tuple(frame, instruction)
    elif name == "unary_positive":
        frame.push(operators.unary(frame.state, "+", frame.pop()))
    elif name != "stopiteration_error":
        raise frame.state.unsupported("opcode", f"no rule for the intrinsic {instruction.text}")


@opcode("UNPACK_SEQUENCE")
def _unpack_sequence(frame: Frame, instruction: Instruction) -> None:
    items = _items_to_unpack(frame)
    if len(items) != instruction.arg:
        few = "not enough" if len(items) < instruction.arg else "too many"
        raise frame.state.raise_exception(ValueError, f"{few} values to unpack (expected {instruction.arg})")
    frame.stack.extend(reversed(items))


@opcode("UNPACK_EX")
def _unpack_ex(frame: Frame, instruction: Instruction) -> None:
    before, after = instruction.arg & 0xFF, instruction.arg >> 8
    items = _items_to_unpack(frame)
    if len(items) < before + after:
        raise frame.state.raise_exception(ValueError, "not enough values to unpack")
    middle = items[before : len(items) - after]
    parts: list[Value] = [*items[:before], ListValue(list(middle)), *items[len(items) - after :]]
    frame.stack.extend(reversed(parts))


def _items_to_unpack(frame: Frame) -> list[Value]:
    value = frame.pop()
    if isinstance(value, DictValue) and value.cls is collections.defaultdict:
        value.guard_keys(frame.state)
    return frame.state.items_of(value)


@opcode("UNARY_NEGATIVE")
def _unary_negative(frame: Frame, instruction: Instruction) -> None:
    frame.push(operators.unary(frame.state, "-", frame.pop()))


@opcode("UNARY_POSITIVE")
def _unary_positive(frame: Frame, instruction: Instruction) -> None:
    frame.push(operators.unary(frame.state, "+", frame.pop()))


@opcode("UNARY_INVERT")
def _unary_invert(frame: Frame, instruction: Instruction) -> None:
    frame.push(operators.unary(frame.state, "~", frame.pop()))


@opcode("UNARY_NOT")
def _unary_not(frame: Frame, instruction: Instruction) -> None:
    frame.push(ConstantValue(not frame.pop().truth(frame.state)))


@opcode("TO_BOOL")
def _to_bool(frame: Frame, instruction: Instruction) -> None:
    frame.push(ConstantValue(frame.pop().truth(frame.state)))


@opcode("BINARY_OP")
def _binary_op(frame: Frame, instruction: Instruction) -> None:
    left, right = frame.pop_many(2)
    frame.push(operators.binary(frame.state, instruction.text, left, right))


@opcode("COMPARE_OP")
def _compare_op(frame: Frame, instruction: Instruction) -> None:
    left, right = frame.pop_many(2)
    result = operators.compare(frame.state, instruction.value, left, right)
    if instruction.text.startswith("bool("):
        result = ConstantValue(result.truth(frame.state))
    frame.push(result)


@opcode("IS_OP")
def _is_op(frame: Frame, instruction: Instruction) -> None:
    left, right = frame.pop_many(2)
    frame.push(ConstantValue(operators.is_same(frame.state, left, right) != bool(instruction.arg)))


@opcode("CONTAINS_OP")
def _contains_op(frame: Frame, instruction: Instruction) -> None:
    item, owner = frame.pop_many(2)
    frame.push(ConstantValue(owner.contains(frame.state, item) != bool(instruction.arg)))
