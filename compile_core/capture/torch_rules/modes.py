"""Modes of torch that a function may switch: gradients, autocast, the default device. Most are nodes of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp.autocast_mode import autocast_decorator
from torch.fx.traceback import annotate

from gradsplit.compile_core.capture.torch_rules.global_state import autocast_state
from gradsplit.compile_core.capture.values.base import CaptureState, Value, constants_of
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule, rule_of_each
from gradsplit.compile_core.capture.values.constants import DEVICE_CONTEXT, ConstantValue, MethodOwner, fold
from gradsplit.compile_core.capture.values.tensors import refuse_unseen
from gradsplit.compile_core.ir.source_writer import SourceWriter
from gradsplit.compile_core.torch_facts.thread_state import enter_autocast, exit_autocast, set_grad_enabled
from gradsplit.compile_core.torch_facts.torch_switches import SWITCHES


class ModeValue(MethodOwner):
    """A context manager of torch; one that is entered where the graph ends is made anew, of its ``arguments``."""

    cls: type
    arguments: tuple[Any, ...] = ()
    is_unseen = False

    def do___enter__(self, state: CaptureState) -> Value:
        if not self.is_unseen:
            refuse_unseen(state, self.describe())
        self.enter(state)
        return self

    def do___exit__(self, state: CaptureState, *raised: Value) -> bool:
        self.leave(state)
        return False

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """As a decorator: a function whose calls run under the mode."""
        return state.wrap(autocast_decorator, None).call(state, [self, *args], kwargs)

    def enter(self, state: CaptureState) -> None:
        state.entered_modes.append(self)

    def leave(self, state: CaptureState) -> None:
        state.entered_modes.remove(self)

    def rebuild(self, writer: Any) -> str:
        shown = ", ".join(map(writer.constant, self.arguments))
        return writer.bind(f"{writer.constant(self.cls)}({shown})")


def set_grad_mode(state: CaptureState, enabled: bool) -> None:
    state.call_state_op(set_grad_enabled, (enabled,))


@contextlib.contextmanager
def grad_mode(state: CaptureState, enabled: bool) -> Iterator[None]:
    """Inside, what the program does is done with gradients, or without."""
    refuse_unseen(state, "a change of grad mode")
    before = torch.is_grad_enabled()
    set_grad_mode(state, enabled)
    try:
        yield
    finally:
        set_grad_mode(state, before)


@answer_to(torch.autocast.__enter__)
def _enter_autocast(state: CaptureState, mode: Value) -> Any:
    if not isinstance(mode, AutocastMode):
        mode = _entered(state, mode) or _autocast_of(state, mode)
    return mode.call_method(state, "__enter__", [], {})


@answer_to(torch.autocast.__exit__)
def _leave_autocast(state: CaptureState, mode: Value, *exception: Value) -> Any:
    found = mode if isinstance(mode, AutocastMode) else _entered(state, mode)
    if found is None:
        raise state.unsupported("autocast", "an autocast object is left that was entered before")
    return found.call_method(state, "__exit__", [], {})


def _entered(state: CaptureState, made_before: Value) -> Value | None:
    """The mode that entering an autocast object began, which existed before the capture."""
    return next((m for m in state.entered_modes if getattr(m, "made_before", None) is made_before), None)


@answer_to(set_grad_enabled)
def _raw_set_grad_enabled(state: CaptureState, mode: Value) -> Any:
    if mode.python_type() is not bool:
        raise state.unsupported("grad-mode", f"{mode.describe()} as a grad mode, which must be a bool")
    set_grad_mode(state, mode.truth(state))
    return ConstantValue(None)


def guard_autocast(state: CaptureState) -> None:
    """The defaults of autocast are read: they must be as they were before the captured call changed any."""
    state.guards.gives(autocast_state, state.autocast_at_start, "the defaults of autocast are the same")


@rule_of_each(torch.get_autocast_dtype, torch.is_autocast_cache_enabled)
def _autocast_default(
    function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    guard_autocast(state)
    return fold(state, function, args, kwargs)


@call_rule(torch.get_default_device)
def _get_default_device(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    device = state.default_device or torch.device("cpu")
    if device.index is None and device.type not in ("cpu", "meta"):
        raise state.unsupported(
            "default-device", f"torch.get_default_device() asks for the current {device.type}"
        )
    return ConstantValue(device)


def restore_modes(state: CaptureState, writer: Any, grad_mode: bool) -> list[str]:
    """End a graph in the modes in which it began; the lines switch the runner to those of the captured program.

    A context manager that is entered there is entered for real, so that its own exit leaves it.
    """
    lines = []
    for mode in list(state.entered_modes):
        lines.append(f"{writer.emit(mode)}.__enter__()")
    for mode in reversed(list(state.entered_modes)):
        mode.leave(state)
    enabled = torch.is_grad_enabled()
    if enabled != grad_mode:
        set_grad_mode(state, grad_mode)
        lines.append(f"{writer.constant(set_grad_enabled)}({enabled})")
    for switch, before in zip(SWITCHES, state.switches_at_start, strict=True):
        values = switch.read()
        if values != before:
            state.call_state_op(switch.set, (*switch.prefix, *before))
            shown = ", ".join(writer.constant(value) for value in (*switch.prefix, *values))
            lines.append(f"{writer.constant(switch.set)}({shown})")
    if state.open_modes or state.function_modes:
        raise state.unsupported("open-mode", "the function leaves a mode of torch changed")
    return lines


class AutocastMode(ModeValue):
    """``torch.autocast``; ``made_before`` is the program's own object, which existed before the capture."""

    cls = torch.autocast

    def __init__(self, arguments: tuple[Any, ...], made_before: Value | None = None) -> None:
        self.arguments = arguments
        self.made_before = made_before
        self.node: Any = None

    def enter(self, state: CaptureState) -> None:
        if self in state.entered_modes:
            raise state.unsupported("autocast", "an autocast object is entered that was not left yet")
        if None in self.arguments[1:]:
            guard_autocast(state)
        self.node = state.call_state_op(enter_autocast, self.arguments)
        state.entered_modes.append(self)

    def leave(self, state: CaptureState) -> None:
        state.call_state_op(exit_autocast, (self.node,))
        state.entered_modes.remove(self)

    def rebuild(self, writer: SourceWriter) -> str:
        if self.made_before is not None:
            return writer.emit(self.made_before)  # type: ignore[attr-defined]
        return super().rebuild(writer)


class DefaultDevice(ModeValue):
    """What ``with torch.device(...)`` enters: the graph says the device of each tensor that is made."""

    cls = torch.device

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self, state: CaptureState) -> None:
        self._before = state.default_device
        state.default_device = self._device
        state.entered_modes.append(self)

    def leave(self, state: CaptureState) -> None:
        state.default_device = self._before
        state.entered_modes.remove(self)

    def rebuild(self, writer: SourceWriter) -> str:
        return writer.constant(self._device)


def _enter_device(state: CaptureState, device: torch.device) -> Value:
    refuse_unseen(state, "a default device")
    DefaultDevice(device).enter(state)
    return ConstantValue(device)


def _leave_device(state: CaptureState, device: torch.device) -> Value:
    entered = [mode for mode in state.entered_modes if isinstance(mode, DefaultDevice)]
    if not entered:
        raise state.unsupported(
            "default-device", f"{device} is left as the default device, which was so before"
        )
    entered[-1].leave(state)
    return ConstantValue(None)


DEVICE_CONTEXT.update({"__enter__": _enter_device, "__exit__": _leave_device})


def _autocast_of(state: CaptureState, made_before: Value) -> AutocastMode:
    names = ("device", "fast_dtype", "_enabled", "_cache_enabled")
    arguments = tuple(made_before.get_attribute(state, name).as_constant() for name in names)
    return AutocastMode(arguments, made_before)


@answer_to(torch.autocast, torch.amp.autocast)
def _autocast(
    state: CaptureState,
    device_type: Value,
    dtype: Value | None = None,
    enabled: Value | None = None,
    cache_enabled: Value | None = None,
) -> Any:
    parts = (device_type, dtype, enabled, cache_enabled)
    real = [None if part is None else part.as_constant() for part in parts]
    return AutocastMode((real[0], real[1], True if real[2] is None else real[2], real[3]))


@answer_to(torch.cuda.amp.autocast)
def _cuda_autocast(state: CaptureState, *args: Value, **kwargs: Value) -> Any:
    return _autocast(state, ConstantValue("cuda"), *args, **kwargs)


class ProfilerRange(ModeValue):
    """``torch.profiler.record_function`` and ``torch.fx.traceback.annotate``: a name for a profiler or for who traces
    plain Python, which the operations of a graph do not have."""

    def __init__(self, maker: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.maker = maker
        self.cls = maker if isinstance(maker, type) else contextlib.AbstractContextManager
        self.args = args
        self.kwargs = kwargs
        self.entered = False

    def enter(self, state: CaptureState) -> None:
        self.entered = True

    def leave(self, state: CaptureState) -> None:
        self.entered = False

    def rebuild(self, writer: SourceWriter) -> str:
        """The range begins where the graph ended: what runs after it is plain Python."""
        shown = [repr(value) for value in self.args]
        shown += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        name = writer.bind(f"{writer.constant(self.maker)}({', '.join(shown)})")
        if self.entered:
            writer.lines.append(f"{name}.__enter__()")
        return name


@rule_of_each(torch.autograd.profiler.record_function, annotate)
def _make_range(maker: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return ProfilerRange(
        maker, constants_of(args), {name: value.as_constant() for name, value in kwargs.items()}
    )


@answer_to(torch.autograd.profiler.record_function.__exit__)
def _leave_range(state: CaptureState, entered: Value, *exception: Value) -> Any:
    """The end of a range that was entered for real, before the graph ended inside of it."""
    state.effects.message_given(lambda real: real.__exit__(None, None, None), [entered])
    return ConstantValue(None)
