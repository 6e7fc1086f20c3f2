"""Switches of torch in captured code (see ``ir.torch_switches``), and ``torch.inference_mode``.

A switch that the program turns is turned for the rest of the capture too, by a node of the graph at every call. Its
setting before is guarded, so that whatever the program computes from it stays true.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.torch_rules.modes import ModeValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value, constants_of
from gradsplit.compile_core.capture.values.call_rules import (
    CALL_RULES,
    CallRule,
    answer_to,
    answers,
)
from gradsplit.compile_core.ir.source_writer import SourceWriter
from gradsplit.compile_core.torch_facts.autograd_engine import (
    allow_saved_tensors_hooks,
    push_saved_tensors_hooks,
    refuse_saved_tensors_hooks,
)
from gradsplit.compile_core.torch_facts.thread_state import (
    InferenceModeGuard,
    enter_inference_mode,
    exit_inference_mode,
    set_grad_enabled,
)
from gradsplit.compile_core.torch_facts.torch_switches import (
    SWITCHES,
    Switch,
    refuse_hooks_for,
    saved_tensor_hooks_are_set,
)


def _guard(state: CaptureState, switch: Switch) -> None:
    at_start = state.switches_at_start[SWITCHES.index(switch)]
    name = getattr(switch.get, "__name__", "a switch of torch")
    state.guards.add([], "{c0}() == {c1}", [switch.read, at_start], f"{name} of torch gives the same")


def turn(state: CaptureState, switch: Switch, *values: Any) -> None:
    """Turn a switch, in the capture and in the graph."""
    _guard(state, switch)
    state.call_state_op(switch.set, (*switch.prefix, *values))


def _matching(function_of: Any, function: Any, args: tuple[Any, ...]) -> Switch | None:
    candidates = [switch for switch in SWITCHES if function_of(switch) == function]
    return next((switch for switch in candidates if args[: len(switch.prefix)] == switch.prefix), None)


def _rule(function: Any, function_of: Any, act: Any) -> CallRule:
    """``act`` has the state, the switch that the arguments name and those behind them."""

    def call(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        values = tuple(constants_of([*args, *kwargs.values()]))
        switch = _matching(function_of, function, values)
        if switch is None:
            raise state.unsupported("switch", f"no rule for {function.__name__}{values}")
        return state.from_constant(act(state, switch, *values[len(switch.prefix) :]))

    return call


def _read(state: CaptureState, switch: Switch) -> Any:
    _guard(state, switch)
    return switch.get(*switch.prefix)


for _switch in SWITCHES:
    CALL_RULES[_switch.set] = _rule(_switch.set, lambda switch: switch.set, turn)
    CALL_RULES[_switch.get] = _rule(_switch.get, lambda switch: switch.get, _read)


def _read_anomaly(state: CaptureState, position: int) -> bool:
    (switch,) = (switch for switch in SWITCHES if switch.set is torch.set_anomaly_enabled)
    _guard(state, switch)
    return switch.read()[position]


answers(
    {
        torch.is_anomaly_enabled: lambda state: _read_anomaly(state, 0),
        torch.is_anomaly_check_nan_enabled: lambda state: _read_anomaly(state, 1),
    }
)


def _refuse_hooks(state: CaptureState, reason: Any) -> Any:
    are_set = saved_tensor_hooks_are_set()
    state.guards.add([], "{c0}() is {c1}", [saved_tensor_hooks_are_set, are_set], "hooks of saved tensors")
    if are_set and reason is not None:
        raise state.raise_exception(RuntimeError, reason)
    (switch,) = (switch for switch in SWITCHES if switch.set is refuse_hooks_for)
    turn(state, switch, None if reason is None else reason.as_constant())


@answer_to(push_saved_tensors_hooks)
def _push_hooks(state: CaptureState, pack: Value, unpack: Value) -> Any:
    """Outside of the graph, so that what runs under the hooks is a graph whose saved tensors they get."""
    explanation = "hooks for what autograd saves begin; what runs under them is a graph of its own"
    raise state.unsupported("saved-tensors-hooks", explanation, "set them around the compiled function")


answer_to(refuse_saved_tensors_hooks)(_refuse_hooks)
answer_to(allow_saved_tensors_hooks)(lambda state: _refuse_hooks(state, None))


class InferenceMode(ModeValue):
    """What ``torch.inference_mode()`` enters: the capture only turns gradients off, the graph enters it itself."""

    cls = InferenceModeGuard

    def enter(self, state: CaptureState) -> None:
        self._before = torch.is_grad_enabled(), state.inference_mode
        set_grad_enabled(False)
        state.inference_mode = True
        state.turned.add(enter_inference_mode)
        self._node = state.add_scalar_node("call_function", enter_inference_mode, (True,), None)
        state.entered_modes.append(self)

    def leave(self, state: CaptureState) -> None:
        state.entered_modes.remove(self)
        grad_enabled, state.inference_mode = self._before
        set_grad_enabled(grad_enabled)
        state.add_scalar_node("call_function", exit_inference_mode, (self._node,), None)

    def rebuild(self, writer: SourceWriter) -> str:
        return writer.bind(f"{writer.constant(InferenceModeGuard)}(True)")


@answer_to(InferenceModeGuard)
def _inference_mode(state: CaptureState, enabled: Value) -> Any:
    if not enabled.as_constant():
        raise state.unsupported("inference-mode", "inference mode turned off")
    return InferenceMode()
