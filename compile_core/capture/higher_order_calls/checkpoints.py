"""``torch.utils.checkpoint.checkpoint``: its function becomes a body, the call one node that recomputes the body."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from gradsplit.compile_core.capture.higher_order_calls.bodies import (
    call_with_bodies,
    capture_body,
    real_object,
)
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir import higher_order

_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@call_rule(torch_checkpoint.checkpoint)
def _checkpoint(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    function, *arguments = args
    keywords = {name: _option(state, kwargs[name]) for name in _OPTIONS if name in kwargs}
    passed_on = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    if keywords.get("use_reentrant") is None or (keywords["use_reentrant"] and passed_on):
        raise state.unsupported(
            "checkpoint", "a checkpoint that says no use_reentrant, or is reentrant and has keywords for its function",
            "pass use_reentrant=False",
        )  # fmt: skip
    if keywords["use_reentrant"] and ("context_fn" in keywords or keywords.get("debug")):
        raise state.unsupported("checkpoint", "a reentrant checkpoint with context_fn or debug")
    tensors = dict.fromkeys(argument.node for argument in arguments if isinstance(argument, TensorValue))
    body = capture_body(state, function, arguments, passed_on, first=list(tensors))
    options = higher_order.CheckpointOptions(keywords, num_arguments=len(tensors))
    nodes = [state.graph.hold("body", body.module), state.graph.hold("options", options), *body.lifted]
    return call_with_bodies(state, higher_order.checkpoint, nodes, body, higher_order.checkpoint_once)


def _option(state: CaptureState, value: Value) -> Any:
    """An option as the object that it is; one that is made anew for each call must consist of known parts."""
    try:
        return real_object(state, value)
    except NotConstant:
        raise state.unsupported("checkpoint", f"{value.describe()} as an option of a checkpoint") from None
