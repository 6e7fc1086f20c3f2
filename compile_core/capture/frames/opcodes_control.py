"""Opcodes of control: jumps, loops, calls, functions, exceptions, with blocks, generators."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

from gradsplit.compile_core.capture.code_objects.instructions import Instruction
from gradsplit.compile_core.capture.code_objects.python_versions import (
    END_FOR_POPS,
    FOR_ITER_POPS_ITERATOR,
    INTRINSICS_2,
    SEND_POPS_ITERATOR,
)
from gradsplit.compile_core.capture.frames.frame import Frame, opcode, value_opcodes
from gradsplit.compile_core.capture.frames.generators import GeneratorValue
from gradsplit.compile_core.capture.frames.opcodes_data import push_callable
from gradsplit.compile_core.capture.object_model.classes import ClassValue, SuperValue
from gradsplit.compile_core.capture.object_model.exceptions import (
    ExceptionValue,
    TracebackValue,
    exception_to_raise,
    make_exception,
    reraise_rest,
    split_group,
)
from gradsplit.compile_core.capture.object_model.functions import CellValue, FunctionValue
from gradsplit.compile_core.capture.values.base import HANDLED_BEFORE, NULL, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.mappings import DictValue, mapping_pairs, new_dict
from gradsplit.compile_core.errors import Unsupported

opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")(Frame.jump)


_CONDITIONS: dict[str, Callable[[Frame, Value], bool]] = {
    "TRUE": lambda frame, value: value.truth(frame.state),
    "FALSE": lambda frame, value: not value.truth(frame.state),
    "NONE": lambda frame, value: is_none(value),
    "NOT_NONE": lambda frame, value: not is_none(value),
}


@opcode(*(f"POP_JUMP_{way}IF_{what}" for way in ("", "FORWARD_", "BACKWARD_") for what in _CONDITIONS))
def _jump_if(frame: Frame, instruction: Instruction) -> None:
    value, what = frame.pop(), instruction.name.partition("IF_")[2]
    try:
        jumps = _CONDITIONS[what](frame, value)
    except Unsupported as error:
        if error.reason_id != "data-dependent-branch":
            raise
        # What the program raises for is assumed not to be: where it is, the call is made again as plain Python.
        jumps = frame.code.only_raises(frame.index)
        certain = jumps != frame.code.only_raises(instruction.target)
        certain = certain and all(
            caller.code.is_left_from(caller.current) for caller in frame.state.frames[:-1]
        )
        if not certain or not frame.state.assume(value, jumps == (what == "TRUE")):
            raise
    if jumps:
        frame.jump(instruction)


@opcode("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _jump_or_pop(frame: Frame, instruction: Instruction) -> None:
    if frame.stack[-1].truth(frame.state) == (instruction.name == "JUMP_IF_TRUE_OR_POP"):
        frame.jump(instruction)
    else:
        frame.pop()


@opcode("FOR_ITER")
def _for_iter(frame: Frame, instruction: Instruction) -> None:
    iterator, stores = frame.stack[-1], frame.code.instructions[frame.index].name == "STORE_FAST"
    item: Any = iterator.advance_unread(frame.state) if stores else iterator.advance(frame.state)
    if item is not None:
        frame.push(item)
        return
    if FOR_ITER_POPS_ITERATOR:
        frame.pop()
    else:
        frame.push(NULL)
    frame.jump(instruction)


@opcode("END_FOR")
def _end_for(frame: Frame, instruction: Instruction) -> None:
    frame.pop_many(END_FOR_POPS)


@opcode("RETURN_VALUE")
def _return_value(frame: Frame, instruction: Instruction, value: Value) -> None:
    frame.result = value


@opcode("RETURN_CONST")
def _return_const(frame: Frame, instruction: Instruction) -> None:
    frame.result = frame.state.from_constant(instruction.value)


@opcode("RETURN_GENERATOR")
def _return_generator(frame: Frame, instruction: Instruction) -> None:
    # The generator's first resumption finds this value on the stack and pops it.
    frame.push(ConstantValue(None))


@opcode("YIELD_VALUE")
def _yield_value(frame: Frame, instruction: Instruction, value: Value) -> Value:
    frame.yielded = value
    # What the expression ``yield`` gives, unless something is sent.
    return ConstantValue(None)


@opcode("SEND")
def _send(frame: Frame, instruction: Instruction, sent: Value) -> None:
    iterator = frame.stack[-1]
    if isinstance(iterator, GeneratorValue):
        item = iterator.resume(frame.state, None if is_none(sent) else sent)
    elif is_none(sent):
        item = iterator.advance(frame.state)
    else:
        item = iterator.call_method(frame.state, "send", [sent], {})
    if item is not None:
        frame.push(item)
        return
    if SEND_POPS_ITERATOR:
        frame.pop()
    frame.push(iterator.returned() or ConstantValue(None))
    frame.jump(instruction)


@opcode("END_SEND")
def _end_send(frame: Frame, instruction: Instruction) -> None:
    del frame.stack[-2]


@opcode("KW_NAMES")
def _kw_names(frame: Frame, instruction: Instruction) -> None:
    frame.keyword_names = instruction.value


def _call(frame: Frame, args: list[Value], named: dict[str, Value]) -> None:
    """Call what lies on the stack: beside a NULL, or with the object of a method above it."""
    first, second = frame.pop_many(2)
    if first is not NULL and second is not NULL:
        args = [second, *args]
    function = second if first is NULL else first
    frame.push(function.call(frame.state, args, named))


def _call_with_last_named(frame: Frame, count: int, names: tuple[str, ...]) -> None:
    args = frame.pop_many(count)
    positional = args[: count - len(names)]
    _call(frame, positional, dict(zip(names, args[len(positional) :], strict=True)))


@opcode("CALL")
def _call_positional(frame: Frame, instruction: Instruction) -> None:
    names, frame.keyword_names = frame.keyword_names, ()
    _call_with_last_named(frame, instruction.arg, names)


@opcode("CALL_KW")
def _call_with_names(frame: Frame, instruction: Instruction, names: Value) -> None:
    _call_with_last_named(frame, instruction.arg, names.as_constant())


@opcode("CALL_FUNCTION_EX")
def _call_function_ex(frame: Frame, instruction: Instruction) -> None:
    named: dict[str, Value] = {}
    if instruction.arg & 1:
        pairs = mapping_pairs(frame.state, frame.pop())
        assert pairs is not None  # the instruction before it made a dictionary
        named = {key.hash_key(frame.state): item for key, item in pairs}
    _call(frame, frame.state.items_of(frame.pop(), hinted=True), named)


@opcode("MAKE_FUNCTION")
def _make_function(frame: Frame, instruction: Instruction, of_code: Value) -> Value:
    code = of_code.as_constant()
    assert isinstance(code, types.CodeType)
    made = FunctionValue(code, frame.function.scope, (), [], {})
    # Up to 3.12 the parts lie on the stack; 3.13 sets each by SET_FUNCTION_ATTRIBUTE and has no argument
    # here.
    for flag in (8, 4, 2, 1):
        if instruction.arg & flag:
            _set_function_part(frame, made, flag, frame.pop())
    return made


@opcode("SET_FUNCTION_ATTRIBUTE")
def _set_function_attribute(frame: Frame, instruction: Instruction, part: Value, made: Any) -> Value:
    _set_function_part(frame, made, instruction.arg, part)
    return made


def _set_function_part(frame: Frame, made: FunctionValue, flag: int, part: Value) -> None:
    if flag == 1:
        made.defaults = frame.state.items_of(part)
    elif flag == 2:
        assert isinstance(part, DictValue)
        made.keyword_defaults = part.held(frame.state)
    elif flag == 8:
        cells = frame.state.items_of(part)
        made.closure = tuple(cell for cell in cells if isinstance(cell, CellValue))
    else:
        made.annotations = part  # names and types in turn, or a dictionary where they were stored as one
        if isinstance(part, SequenceValue):
            items = part.all(frame.state)
            made.annotations = new_dict(list(zip(items[::2], items[1::2], strict=True)), frame.state)


@opcode("LOAD_SUPER_ATTR")
def _load_super_attr(frame: Frame, instruction: Instruction, maker: Value, cls: Value, owner: Value) -> None:
    if not isinstance(maker, ClassValue) or maker.real is not super or not isinstance(cls, ClassValue):
        raise frame.state.unsupported("super", "a call of a name super that is not Python's")
    value = SuperValue(cls.real, owner).get_attribute(frame.state, instruction.value)
    if instruction.arg & 1:
        push_callable(frame, value)
    else:
        frame.push(value)


@opcode("RAISE_VARARGS")
def _raise(frame: Frame, instruction: Instruction) -> None:
    state = frame.state
    if instruction.arg == 0:
        handled = state.handled_exception()
        if handled is None:
            raise state.raise_exception(RuntimeError, "No active exception to reraise")
        raise SymbolicRaise(handled)
    cause = frame.pop() if instruction.arg == 2 else None
    raised = exception_to_raise(state, frame.pop())
    if cause is not None and isinstance(raised.value, ExceptionValue):
        if isinstance(cause, ClassValue):
            cause = cause.call(state, [], {})
        if not is_none(cause) and not isinstance(cause, ExceptionValue):
            raise state.raise_exception(TypeError, "exception causes must derive from BaseException")
        raised.value.set_attribute(state, "__cause__", cause)
    raise raised


@opcode("PUSH_EXC_INFO")
def _push_exc_info(frame: Frame, instruction: Instruction, value: Value) -> Value:
    frame.handled.append(value)
    frame.push(HANDLED_BEFORE)
    return value


@opcode("POP_EXCEPT")
def _pop_except(frame: Frame, instruction: Instruction) -> None:
    frame.pop()
    frame.handled.pop()


@opcode("CHECK_EXC_MATCH")
def _check_exc_match(frame: Frame, instruction: Instruction, wanted: Value) -> Value:
    classes = _exception_classes(frame, wanted)
    return ConstantValue(issubclass(frame.stack[-1].python_type(), classes))


def _exception_classes(frame: Frame, wanted: Value) -> tuple[type, ...]:
    """The classes of an except clause; the tuple may not be nested."""
    classes = frame.state.items_of(wanted) if isinstance(wanted, SequenceValue) else [wanted]
    found = []
    for entry in classes:
        if not isinstance(entry, ClassValue) or not issubclass(entry.real, BaseException):
            message = "catching classes that do not inherit from BaseException is not allowed"
            raise frame.state.raise_exception(TypeError, message)
        found.append(entry.real)
    return tuple(found)


@opcode("CHECK_EG_MATCH")
def _check_group_match(frame: Frame, instruction: Instruction, value: Value, wanted: Value) -> Value:
    state, classes = frame.state, _exception_classes(frame, wanted)
    matched, rest = split_group(state, value, lambda part: issubclass(part.cls, classes))
    if matched is value and not issubclass(value.python_type(), BaseExceptionGroup):
        parts: list[Value] = [ConstantValue(""), SequenceValue([value], tuple)]
        matched = make_exception(state, BaseExceptionGroup, parts, {})
    frame.push(rest or ConstantValue(None))
    if matched is not None:
        frame.handled[-1] = matched
    return matched or ConstantValue(None)


@opcode("PREP_RERAISE_STAR")
def _prepare_reraise(frame: Frame, instruction: Instruction, original: Value, parts: Value) -> Value:
    return reraise_rest(frame.state, original, frame.state.items_of(parts))


@opcode("CALL_INTRINSIC_2")
def _call_intrinsic_2(frame: Frame, instruction: Instruction, original: Value, parts: Value) -> Value:
    if INTRINSICS_2.get(instruction.arg) != "prepare_reraise_star":
        raise frame.state.unsupported("opcode", f"no rule for the intrinsic {instruction.text}")
    return _prepare_reraise(frame, instruction, original, parts)


@opcode("RERAISE", "CLEANUP_THROW")
def _reraise(frame: Frame, instruction: Instruction, error: Value) -> None:
    # The latter comes when something was thrown into a ``yield from``; what the inner iterator returned arrives
    # elsewhere.
    raise SymbolicRaise(error)


@opcode("BEFORE_WITH")
def _before_with(frame: Frame, instruction: Instruction, manager: Value) -> Value:
    frame.push(manager.get_attribute(frame.state, "__exit__"))
    return manager.get_attribute(frame.state, "__enter__").call(frame.state, [], {})


@opcode("WITH_EXCEPT_START")
def _with_except_start(frame: Frame, instruction: Instruction) -> None:
    leave, value = frame.stack[-4], frame.stack[-1]
    cls = frame.state.wrap(value.python_type(), None)
    frame.push(leave.call(frame.state, [cls, value, TracebackValue()], {}))


@opcode("IMPORT_NAME")
def _import_name(frame: Frame, instruction: Instruction, of_level: Value, names: Value) -> Value:
    state, scope, level = frame.state, frame.function.scope, of_level.as_constant()
    name = instruction.value if level == 0 else f"{'.' * level}{instruction.value}"
    module = state.imported_module(name, scope.get("__package__"), names.as_constant() or ())
    if module is None:
        raise state.unsupported("import", f"an import of {name}", "import at module level")
    return module


value_opcodes(
    {
        "GET_ITER": lambda frame, instruction, iterable: iterable.iterate(frame.state),
        "GET_YIELD_FROM_ITER": lambda frame, instruction, iterable: iterable.iterate(frame.state),
        "IMPORT_FROM": lambda frame, instruction: frame.stack[-1].get_attribute(
            frame.state, instruction.value
        ),
        "GET_LEN": lambda frame, instruction: ConstantValue(frame.stack[-1].length(frame.state)),
        # Its call has no rule: a class that is made at each call is made by Python, after a graph break.
        "LOAD_BUILD_CLASS": lambda frame, instruction: frame.state.wrap(builtins.__build_class__, None),
        "LOAD_ASSERTION_ERROR": lambda frame, instruction: frame.state.wrap(AssertionError, None),
    }
)
