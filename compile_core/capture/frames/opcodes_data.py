"""Opcodes that move data, and of attributes, subscripts and operators."""

from __future__ import annotations

import builtins as builtins_module

from gradsplit.compile_core.capture.code_objects.instructions import Instruction
from gradsplit.compile_core.capture.code_objects.python_versions import (
    LOAD_ATTR_HAS_METHOD_BIT,
    NO_EFFECT,
    NULL_IS_ABOVE_CALLABLE,
)
from gradsplit.compile_core.capture.frames.frame import Frame, opcode, value_opcodes
from gradsplit.compile_core.capture.object_model.functions import CellValue
from gradsplit.compile_core.capture.object_model.instance_dict import MISSING
from gradsplit.compile_core.capture.object_model.libraries import is_library_name, is_library_state
from gradsplit.compile_core.capture.operations import comparisons, operators
from gradsplit.compile_core.capture.values.base import NULL, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue, SliceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir.sources import GlobalSource, ItemSource


@opcode(*sorted(NO_EFFECT))
def _nothing(frame: Frame, instruction: Instruction) -> None:
    pass


@opcode("SWAP")
def _swap(frame: Frame, instruction: Instruction) -> None:
    stack, depth = frame.stack, instruction.arg
    stack[-1], stack[-depth] = stack[-depth], stack[-1]


@opcode("LOAD_CONST")
def _load_const(frame: Frame, instruction: Instruction) -> None:
    value = frame.state.from_constant(instruction.value)
    if isinstance(value, SequenceValue):
        value.is_literal = True
    frame.push(value)


def _range(start: Value, stop: Value) -> SliceValue:
    return SliceValue([start, stop, ConstantValue(None)])


def load_local(frame: Frame, name: str) -> Value:
    if name in frame.cells:
        # LOAD_FAST of a cell variable occurs in comprehensions that were inlined, for the cell itself.
        return frame.cells[name]
    value = frame.locals.get(name)
    if value is None or value is NULL:
        raise _unset(frame, name)
    realized = frame.locals[name] = frame.state.realize(value)
    return realized


def store_local(frame: Frame, name: str, value: Value) -> None:
    if isinstance(value, CellValue):
        # An inlined comprehension ends: its variable is the function's cell again.
        frame.cells[name] = value
        frame.locals.pop(name, None)
        return
    frame.locals[name] = value
    if isinstance(value, TensorValue):
        frame.state.graph.name_after(value.node, name)


@opcode("LOAD_FAST_AND_CLEAR")
def _load_fast_and_clear(frame: Frame, instruction: Instruction) -> None:
    name = instruction.value
    if name in frame.cells:
        # Until the comprehension ends the place is a plain variable, or a cell that MAKE_CELL puts there.
        frame.push(frame.cells.pop(name))
    else:
        frame.push(frame.locals.pop(name, NULL))


@opcode("MAKE_CELL")
def _make_cell(frame: Frame, instruction: Instruction) -> None:
    # At the start of a function the frame made the cells already; an inlined comprehension makes fresh ones.
    if frame.steps > len(frame.code.code.co_cellvars) + 1:
        frame.cells[instruction.value] = CellValue(None)


@opcode("DELETE_FAST")
def _delete_fast(frame: Frame, instruction: Instruction) -> None:
    load_local(frame, instruction.value)
    del frame.locals[instruction.value]


@opcode("LOAD_DEREF")
def _load_deref(frame: Frame, instruction: Instruction) -> None:
    cell = frame.cells[instruction.value]
    if cell.content is None:
        raise _unset(frame, instruction.value)
    cell.content = frame.state.realize(cell.content)
    frame.push(cell.content)


@opcode("DELETE_DEREF")
def _delete_deref(frame: Frame, instruction: Instruction) -> None:
    if frame.cells[instruction.value].content is None:
        raise _unset(frame, instruction.value)
    frame.cells[instruction.value].store(frame.state, None)


def _unset(frame: Frame, name: str) -> SymbolicRaise:
    unbound = f"variable {name!r} where it is not associated with a value"
    if name not in frame.code.code.co_freevars:
        return frame.state.raise_exception(UnboundLocalError, f"cannot access local {unbound}")
    return frame.state.raise_exception(NameError, f"cannot access free {unbound} in enclosing scope")


def load_global(frame: Frame, name: str) -> Value:
    state, scope = frame.state, frame.function.scope
    library = is_library_name(scope.get("__name__"))
    stored = state.effects.stored_global(scope, name)
    if stored is not None and stored is not MISSING:
        return stored
    if name in scope and stored is not MISSING:
        if library and not is_library_state(str(scope.get("__name__")), name, scope[name]):
            return state.wrap(scope[name], None)
        return state.wrap(scope[name], GlobalSource(state.reference("globals", scope), name))
    builtins = scope.get("__builtins__", vars(builtins_module))
    names = builtins if isinstance(builtins, dict) else vars(builtins)
    if not library and name not in scope:
        state.guards.absent(state.reference_source("globals", scope), name)
    place = state.reference_source("builtins", names)
    if name not in names:
        state.guards.absent(place, name)
        raise state.raise_exception(NameError, f"name {name!r} is not defined")
    if not library:
        # Programs replace some, as ``print`` on ranks that are to be silent.
        state.guards.is_object(ItemSource(place, name), names[name])
    return state.wrap(names[name], None)


@opcode("LOAD_GLOBAL")
def _load_global(frame: Frame, instruction: Instruction) -> None:
    value = load_global(frame, instruction.value)
    if instruction.arg & 1 and not NULL_IS_ABOVE_CALLABLE:
        frame.push(NULL)
    frame.push(value)
    if instruction.arg & 1 and NULL_IS_ABOVE_CALLABLE:
        frame.push(NULL)


@opcode("DELETE_GLOBAL")
def _delete_global(frame: Frame, instruction: Instruction) -> None:
    state, scope, name = frame.state, frame.function.scope, instruction.value
    stored = state.effects.stored_global(scope, name)
    present = stored is not MISSING if stored is not None else name in scope
    if not present:
        if stored is None:
            state.guards.absent(state.reference_source("globals", scope), name)
        raise state.raise_exception(NameError, f"name {name!r} is not defined")
    load_global(frame, name)  # guards that it is there
    state.effects.global_changed(scope, name, MISSING)


@opcode("LOAD_ATTR")
def _load_attr(frame: Frame, instruction: Instruction) -> None:
    if LOAD_ATTR_HAS_METHOD_BIT and instruction.arg & 1:
        _load_method(frame, instruction)
    else:
        frame.push(frame.pop().get_attribute(frame.state, instruction.value))


@opcode("LOAD_METHOD")
def _load_method(frame: Frame, instruction: Instruction) -> None:
    # The attribute is bound here already, so the place of self stays NULL.
    push_callable(frame, frame.pop().get_attribute(frame.state, instruction.value))


def push_callable(frame: Frame, value: Value) -> None:
    pair = [value, NULL] if NULL_IS_ABOVE_CALLABLE else [NULL, value]
    frame.stack.extend(pair)


value_opcodes(
    {
        "POP_TOP": lambda frame, instruction, value: None,
        "PUSH_NULL": lambda frame, instruction: NULL,
        "COPY": lambda frame, instruction: frame.stack[-instruction.arg],
        "STORE_FAST": lambda frame, instruction, value: store_local(frame, instruction.value, value),
        "STORE_FAST_MAYBE_NULL": lambda frame, instruction, value: store_local(
            frame, instruction.value, value
        ),
        "LOAD_FAST": lambda frame, instruction: load_local(frame, instruction.value),
        "LOAD_FAST_CHECK": lambda frame, instruction: load_local(frame, instruction.value),
        "LOAD_CLOSURE": lambda frame, instruction: load_local(frame, instruction.value),
        "STORE_DEREF": lambda frame, instruction, value: frame.cells[instruction.value].store(
            frame.state, value
        ),
        "STORE_ATTR": lambda frame, instruction, value, owner: owner.set_attribute(
            frame.state, instruction.value, value
        ),
        "DELETE_ATTR": lambda frame, instruction, owner: owner.delete_attribute(
            frame.state, instruction.value
        ),
        "BINARY_SUBSCR": lambda frame, instruction, owner, key: owner.get_item(frame.state, key),
        "STORE_SUBSCR": lambda frame, instruction, value, owner, key: owner.set_item(frame.state, key, value),
        "DELETE_SUBSCR": lambda frame, instruction, owner, key: owner.delete_item(frame.state, key),
        "BINARY_SLICE": lambda frame, instruction, owner, start, stop: owner.get_item(
            frame.state, _range(start, stop)
        ),
        "STORE_SLICE": lambda frame, instruction, value, owner, start, stop: owner.set_item(
            frame.state, _range(start, stop), value
        ),
        "UNARY_NEGATIVE": lambda frame, instruction, value: operators.unary(frame.state, "-", value),
        "UNARY_POSITIVE": lambda frame, instruction, value: operators.unary(frame.state, "+", value),
        "UNARY_INVERT": lambda frame, instruction, value: operators.unary(frame.state, "~", value),
        "UNARY_NOT": lambda frame, instruction, value: operators.negation(frame.state, value),
        "TO_BOOL": lambda frame, instruction, value: ConstantValue(value.truth(frame.state)),
        "BINARY_OP": lambda frame, instruction, left, right: operators.binary(
            frame.state, instruction.text, left, right
        ),
        # 3.13 may ask for a bool at once. What comes next asks for it, too, and can end the graph after the comparison.
        "COMPARE_OP": lambda frame, instruction, left, right: comparisons.compare(
            frame.state, instruction.value, left, right
        ),
        "IS_OP": lambda frame, instruction, left, right: ConstantValue(
            comparisons.is_same(frame.state, left, right) != bool(instruction.arg)
        ),
        "CONTAINS_OP": lambda frame, instruction, item, owner: ConstantValue(
            owner.contains(frame.state, item) != bool(instruction.arg)
        ),
        "STORE_GLOBAL": lambda frame, instruction, value: frame.state.effects.global_changed(
            frame.function.scope, instruction.value, value
        ),
    }
)
