"""Switches of torch in captured code (see ``ir.torch_switches``), and ``torch.inference_mode``.

A switch that the program turns is turned for the rest of the capture too, by a node of the graph at every call. Its
setting before is guarded, so that whatever the program computes from it stays true.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.torch_rules.modes import ModeValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value, constants_of
from gradsplit.compile_core.capture.values.call_rules import answer_to, answers, rule_of_each
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
    state.guards.gives(switch.read, at_start, f"{name} of torch gives the same")


def turn(state: CaptureState, switch: Switch, *values: Any) -> None:
    """Turn a switch, in the capture and in the graph."""
    _guard(state, switch)
    state.call_state_op(switch.set, (*switch.prefix, *values))


def _read(state: CaptureState, switch: Switch) -> Any:
    _guard(state, switch)
    return switch.get(*switch.prefix)


@rule_of_each(*(function for switch in SWITCHES for function in (switch.set, switch.get)))
def _turn_or_read(function: Any, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What a function does with the switch that its first arguments name."""
    values = tuple(constants_of([*args, *kwargs.values()]))
    for switch in SWITCHES:
        if function in (switch.set, switch.get) and values[: len(switch.prefix)] == switch.prefix:
            act = turn if function == switch.set else _read
            return state.from_constant(act(state, switch, *values[len(switch.prefix) :]))
    raise state.unsupported("switch", f"no rule for {function.__name__}{values}")


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
    arguments = (True,)

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


@answer_to(InferenceModeGuard)
def _inference_mode(state: CaptureState, enabled: Value) -> Any:
    if not enabled.as_constant():
        raise state.unsupported("inference-mode", "inference mode turned off")
    return InferenceMode()
