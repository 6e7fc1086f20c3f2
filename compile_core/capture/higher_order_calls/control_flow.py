"""``torch.cond`` and ``torch.while_loop`` with tensors that decide: both functions become bodies of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.capture.higher_order_calls.bodies import (
    Body,
    body_argument,
    body_graph,
    call_with_bodies,
    capture_body,
    tensors_of,
)
from gradsplit.compile_core.capture.higher_order_calls.flex_attention import attend
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to, call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir import control_flow as nodes
from gradsplit.compile_core.torch_facts.higher_order_operators import (
    associative_scan,
    call_operator,
    cond,
    cond_operator,
    flex_attention_operator,
    python_kernel,
    while_loop,
)


@answer_to(cond, cond_operator)
def _cond(
    state: CaptureState, pred: Value, true_fn: Value, false_fn: Value, operands: Value | None = None
) -> Any:
    given = [] if operands is None else state.items_of(operands)
    if isinstance(pred, ConstantValue):
        return (true_fn if pred.truth(state) else false_fn).call(state, given, {})
    if not isinstance(pred, TensorValue) or pred.fake.numel() != 1:
        raise state.unsupported("cond", f"torch.cond decided by {pred.describe()}")
    first = list(dict.fromkeys(tensor.node for value in given for tensor in tensors_of(state, value)))
    on_true = capture_body(state, true_fn, given, first=first)
    # The second body reads what the first one reads, in the same places, and may read more.
    on_false = capture_body(state, false_fn, given, first=on_true.lifted)
    if on_true.lifted != on_false.lifted:
        on_true = capture_body(state, true_fn, given, first=on_false.lifted)
    _check_alike(state, on_true.tensors, on_false.tensors, "the branches of torch.cond")
    _check_pure(state, (on_true, on_false), on_true.lifted)
    held = [state.graph.hold("on_true", on_true.module), state.graph.hold("on_false", on_false.module)]
    return call_with_bodies(
        state, nodes.cond, [pred.node, *held, *on_true.lifted], on_true, nodes.cond_example
    )


@answer_to(while_loop)
def _while_loop(state: CaptureState, cond_fn: Value, body_fn: Value, carried_inputs: Value) -> Any:
    carried = [value for value in state.items_of(carried_inputs) if isinstance(value, TensorValue)]
    if len(carried) != len(state.items_of(carried_inputs)):
        raise state.unsupported("while-loop", "torch.while_loop with something else than tensors to carry")
    condition = _capture_step(state, cond_fn, carried, [])
    step = _capture_step(state, body_fn, carried, condition.lifted)
    if step.lifted != condition.lifted:
        condition = _capture_step(state, cond_fn, carried, step.lifted)
    _check_alike(state, step.tensors, carried, "what torch.while_loop carries")
    if len(condition.tensors) != 1:
        raise state.unsupported("while-loop", "torch.while_loop with a condition that is no tensor")
    given = [*(tensor.node for tensor in carried), *step.lifted]
    if torch.is_grad_enabled() and any(node.meta["example_value"].requires_grad for node in given):
        raise state.unsupported("while-loop", "torch.while_loop over tensors that require gradients")
    held = [state.graph.hold("condition", condition.module), state.graph.hold("step", step.module)]
    return call_with_bodies(
        state, nodes.while_loop, [*held, len(carried), *given], step, nodes.while_loop_example
    )


@call_rule(call_operator)
def _call_operator(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Of other operators that take functions: what they compute with, where they need no gradients, or have those of
    what they compute. (Those of an associative scan are so where its elements are combined one by one; where several
    tensors are, as in a state space model, torch's own operator leaves out what one is for the others.)"""
    operator, *given = args
    real = getattr(operator, "real", None)
    if real is flex_attention_operator:
        return attend(state, given, kwargs)
    kernel = python_kernel(real)
    differentiable = torch.is_grad_enabled() and any(
        tensor.node.meta["example_value"].requires_grad for tensor in state.tensor_of_fake.values()
    )
    if kernel is None or (differentiable and real is not associative_scan):
        raise state.unsupported("higher-order-operator", f"a call of {operator.describe()}")
    return state.wrap(kernel, None).call(state, given, kwargs)


def _capture_step(
    state: CaptureState, function: Value, carried: Sequence[TensorValue], first: Sequence[Node]
) -> Body:
    """One step on tensors that stand for the carried ones."""
    with body_graph(state) as graph:
        with graph.fake_mode:
            fakes = [torch.empty_like(tensor.fake) for tensor in carried]
        inner = [
            body_argument(state, graph, tensor, fake) for tensor, fake in zip(carried, fakes, strict=True)
        ]
        for node in first:
            graph.own_node(node)
        result = function.call(state, list(inner), {})
        values = result.all(state) if isinstance(result, SequenceValue) else [result]
        tensors = [value for value in values if isinstance(value, TensorValue)]
        if any(value.fake._version for value in inner):
            raise state.unsupported("while-loop", "torch.while_loop changes a tensor in place")
        module = graph.close([tensor.node for tensor in tensors])
        return Body(module, tuple(graph.lifted), result, tuple(tensors))


def _check_alike(
    state: CaptureState, one: Sequence[TensorValue], other: Sequence[TensorValue], subject: str
) -> None:
    def metadata(tensor: TensorValue) -> Any:
        return tensor.fake.dtype, tensor.fake.shape, tensor.fake.device, tensor.fake.stride()

    if [metadata(tensor) for tensor in one] != [metadata(tensor) for tensor in other]:
        raise state.unsupported("different-branches", f"{subject} have different metadata")


def _check_pure(state: CaptureState, bodies: Sequence[Body], lifted: Sequence[Node]) -> None:
    """No branch may change a tensor in place: whether it did would be known only to the data."""
    for body in bodies:
        fakes = [node.meta["example_value"] for node in lifted]
        versions = [fake._version for fake in fakes]
        with state.graph.fake_mode:
            body.module(*fakes)
        if [fake._version for fake in fakes] != versions:
            raise state.unsupported("mutation-in-branch", "a branch of torch.cond changes a tensor in place")
