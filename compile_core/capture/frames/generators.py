"""Generators: frames that run on at each item, with what is sent and thrown into them."""

from __future__ import annotations

import builtins
import types

from gradsplit.compile_core.capture.code_objects.python_versions import INTRINSICS_1, SEND_POPS_ITERATOR
from gradsplit.compile_core.capture.frames.frame import Frame
from gradsplit.compile_core.capture.object_model.exceptions import ExceptionValue, exception_to_raise
from gradsplit.compile_core.capture.values.base import CaptureState, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, IteratorValue, MethodOwner, is_none


class GeneratorValue(MethodOwner, IteratorValue):
    """A generator that the captured program made."""

    cls = types.GeneratorType

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.started = False
        self.running = False
        self.finished = False
        self._returned: Value | None = None

    def resume(
        self, state: CaptureState, sent: Value | None = None, raised: SymbolicRaise | None = None
    ) -> Value | None:
        """Run to the next ``yield``; None where the generator returned."""
        if self.running:
            raise state.raise_exception(ValueError, "generator already executing")
        if self.finished or (raised is not None and not self.started):
            self.finished = True
            if raised is not None:
                raise raised
            return None
        if sent is not None and self.started:
            self.frame.stack[-1] = sent
        self.started = self.running = True
        try:
            self.frame.run(raised)
        except SymbolicRaise as left:
            self.finished = True
            raise self._leaving(state, left) from None
        finally:
            self.running = False
        if self.frame.yielded is None:
            self.finished = True
            self._returned = self.frame.result
        return self.frame.yielded

    def _leaving(self, state: CaptureState, left: SymbolicRaise) -> SymbolicRaise:
        """StopIteration must not look like the generator's own end."""
        if not issubclass(left.value.python_type(), StopIteration):
            return left
        error = state.raise_exception(RuntimeError, "generator raised StopIteration")
        for link in ("__context__", "__cause__"):
            error.value.set_attribute(state, link, left.value)
        return error

    @property
    def has_unfinished_blocks(self) -> bool:
        """Whether Python would run code of the generator when it is dropped: it stands in a try or with block."""
        if not self.started or self.finished:
            return False
        return _runs_code_at_exit(self.frame, self.frame.current)

    def advance(self, state: CaptureState) -> Value | None:
        return self.resume(state)

    def returned(self) -> Value | None:
        value, self._returned = self._returned, None
        return value

    def do_send(self, state: CaptureState, value: Value | None = None) -> Value:
        nothing = value is None or is_none(value)
        if not nothing and not self.started and not self.finished:
            raise state.raise_exception(TypeError, "can't send non-None value to a just-started generator")
        return self._item_or_stop(state, self.resume(state, value))

    def do_throw(self, state: CaptureState, error: Value, *more: Value) -> Value:
        if more and not is_none(more[0]):
            error = more[0]  # the old form: class, exception, traceback
            if not isinstance(error, ExceptionValue):
                raise state.unsupported("generator", "throw() of a class with arguments")
        return self._item_or_stop(state, self.pass_exception(state, exception_to_raise(state, error)))

    def pass_exception(self, state: CaptureState, raised: SymbolicRaise) -> Value | None:
        """Throw into the innermost generator that this one has delegated to with ``yield from``."""
        inner = self._delegate()
        if inner is None:
            return self.resume(state, raised=raised)
        item, passed_on, self.running = None, None, True
        try:
            if issubclass(raised.value.python_type(), GeneratorExit):
                inner.do_close(state)
                passed_on = raised
            else:
                item = inner.pass_exception(state, raised)
        except SymbolicRaise as left:
            passed_on = left
        finally:
            self.running = False
        if passed_on is not None:
            return self.resume(state, raised=passed_on)
        if item is not None:
            return item
        self._leave_delegate(inner.returned() or ConstantValue(None))
        return self.resume(state)

    def _delegate(self) -> GeneratorValue | None:
        """The generator that this one stands in a ``yield from`` of."""
        frame = self.frame
        if not self.started or self.finished or self.running:
            return None
        following = [entry.name for entry in frame.code.instructions[frame.index : frame.index + 2]]
        if following != ["RESUME", "JUMP_BACKWARD_NO_INTERRUPT"]:
            return None
        inner = frame.stack[-2]
        return inner if isinstance(inner, GeneratorValue) else None

    def _leave_delegate(self, value: Value) -> None:
        """Go on after the ``yield from`` with the value that the inner generator returned."""
        frame = self.frame
        send = frame.code.instructions[frame.code.instructions[frame.index + 1].target]
        frame.pop()
        if SEND_POPS_ITERATOR:
            frame.pop()
        frame.push(value)
        frame.jump(send)

    def do_close(self, state: CaptureState) -> None:
        if not self.finished:
            stop = SymbolicRaise(ExceptionValue(GeneratorExit, []))
            try:
                item = self.pass_exception(state, stop)
            except SymbolicRaise as raised:
                if not issubclass(raised.value.python_type(), (GeneratorExit, StopIteration)):
                    raise
            else:
                if item is not None:
                    raise state.raise_exception(RuntimeError, "generator ignored GeneratorExit")

    def _item_or_stop(self, state: CaptureState, item: Value | None) -> Value:
        if item is not None:
            return item
        raise stop_iteration(state, self)

    do___next__ = do_send


def _runs_code_at_exit(frame: Frame, index: int) -> bool:
    """Whether GeneratorExit at an instruction reaches code of the program, on its way out through the handlers."""
    instructions = frame.code.instructions
    handler = frame.code.handler_at(index)
    if handler is None:
        return False
    at = handler.target
    # Since 3.12 the whole body has a handler that only turns StopIteration into RuntimeError.
    if instructions[at].name == "CALL_INTRINSIC_1":
        return INTRINSICS_1.get(instructions[at].arg) != "stopiteration_error"
    # Likewise a yield from has one that takes StopIteration alone.
    if instructions[at].name == "CLEANUP_THROW":
        return _runs_code_at_exit(frame, at)
    if [entry.name for entry in instructions[at : at + 3]] == ["COPY", "POP_EXCEPT", "RERAISE"]:
        return _runs_code_at_exit(frame, at + 2)
    if instructions[at].name != "PUSH_EXC_INFO":
        return True
    at += 1
    while instructions[at].name == "LOAD_GLOBAL" and _is_common_exception(frame, instructions[at].value):
        jump = instructions[at + 2]
        if instructions[at + 1].name != "CHECK_EXC_MATCH" or "IF_FALSE" not in jump.name:
            return True
        at = jump.target
    return instructions[at].name != "RERAISE" or _runs_code_at_exit(frame, at)


def _is_common_exception(frame: Frame, name: str) -> bool:
    """Whether a global name is a built-in exception that GeneratorExit is none of."""
    found = None if name in frame.function.scope else getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


def stop_iteration(state: CaptureState, iterator: Value) -> SymbolicRaise:
    """The StopIteration at the end of an iterator: the one it raised, or one with what a generator returned."""
    stopped = iterator.stopped
    value = iterator.returned()
    if stopped is not None:
        return stopped
    raised = state.raise_exception(StopIteration)
    assert isinstance(raised.value, ExceptionValue)
    if value is not None and not is_none(value):
        raised.value.args = [value]
    return raised
