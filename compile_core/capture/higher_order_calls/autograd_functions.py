"""``torch.autograd.Function``: ``apply`` is one node, and its class runs the user's code when the node does.

That code is Python, so it must be known to do nothing but compute: ``forward`` and ``backward`` are interpreted once
into a graph that is thrown away. What they read is guarded thereby; what has no rule, and any change of something
outside, ends the graph before the call. Tensors that they read without having been given them would escape autograd and
guards in the traced program, and are refused too.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch.autograd.function import FunctionCtx

from gradsplit.compile_core.capture.higher_order_calls.bodies import BodyGraph, body_graph, real_object
from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.classes import ClassValue
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.torch_rules.modes import grad_mode
from gradsplit.compile_core.capture.values.base import CaptureState, NotConstant, Value
from gradsplit.compile_core.capture.values.call_rules import call_rule
from gradsplit.compile_core.capture.values.constants import ConstantValue, MethodOwner
from gradsplit.compile_core.capture.values.containers import SequenceValue
from gradsplit.compile_core.capture.values.tensors import TensorValue, without_attributes
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir import higher_order
from gradsplit.compile_core.torch_facts.autograd_engine import SingleLevelFunction

# Until torch 2.13 a class method in Python, whose function the rule is for; from 2.14 on a built-in class method.
_APPLY: Any = torch.autograd.Function.__dict__["apply"]
_BASE = SingleLevelFunction


@call_rule(getattr(_APPLY, "__func__", _APPLY))
def _apply(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    cls, *rest = args
    if not isinstance(cls, ClassValue) or kwargs:
        raise state.unsupported("autograd-function", "apply with keyword arguments")
    _check_harmless(state, cls, rest)
    nodes = [state.graph.hold("function", cls.real), *(_node_argument(state, value) for value in rest)]
    return state.call_tensor_nodes(higher_order.autograd_function, nodes)


def _node_argument(state: CaptureState, value: Value) -> Any:
    try:
        return value.graph_argument(state)
    except Unsupported:
        try:
            return state.graph.hold("argument", real_object(state, value))
        except NotConstant:
            pass
        raise


def _check_harmless(state: CaptureState, cls: ClassValue, args: list[Value]) -> None:
    """Interpret forward and backward; raise Unsupported where they do what a node cannot do for them."""
    with body_graph(state) as graph:
        given = [graph.own_node(tensor.node) for value in args for tensor in _tensors(value)]
        context = FunctionContext(
            tuple(isinstance(value, TensorValue) and value.fake.requires_grad for value in args)
        )
        with grad_mode(state, False):
            results = _run_forward(state, cls, context, args)
        for value in (*args, *results):
            without_attributes(state, _tensors(value))
        if torch.is_grad_enabled() and any(context.needs_input_grad):
            if find_class_entry(state, cls.real, "backward")[0] is _BASE:
                raise state.unsupported("autograd-function", f"{cls.real.__qualname__} has no backward")
            gradients = [_gradient(graph, context, value) for value in results]
            with grad_mode(state, False):
                cls.get_attribute(state, "backward").call(state, [context, *gradients], {})
        if any(placeholder not in given for placeholder in graph.lifted.values()):
            raise state.unsupported(
                "autograd-function",
                f"{cls.real.__qualname__} reads a tensor that is not among its arguments",
                "pass the tensor to apply",
            )


def _tensors(value: Value) -> list[TensorValue]:
    if isinstance(value, TensorValue):
        return [value]
    if isinstance(value, SequenceValue):
        return [tensor for item in value.items if isinstance(item, Value) for tensor in _tensors(item)]
    return []


def _run_forward(
    state: CaptureState, cls: ClassValue, context: FunctionContext, args: list[Value]
) -> list[Value]:
    forward = cls.get_attribute(state, "forward")
    if find_class_entry(state, cls.real, "setup_context")[0] is _BASE:
        result = forward.call(state, [context, *args], {})
    else:
        result = forward.call(state, list(args), {})
        cls.get_attribute(state, "setup_context").call(
            state, [context, SequenceValue(list(args), tuple), result], {}
        )
    if isinstance(result, SequenceValue) and issubclass(result.cls, tuple):
        return result.all(state)
    return [result]


def _gradient(graph: BodyGraph, context: FunctionContext, value: Value) -> Value:
    """What backward gets for a result: a tensor like it (zeros where nobody used it), None where it is to get that."""
    asks_for_none = any(not each.as_constant() for each in context.told.get("set_materialize_grads", ()))
    has_none = asks_for_none and value in context.told.get("mark_non_differentiable", ())
    if not isinstance(value, TensorValue) or has_none:
        return ConstantValue(None)
    with graph.fake_mode:
        fake = torch.empty_like(value.fake)
    return TensorValue(graph.add_placeholder("gradient", fake), fake, torch.Tensor)


def _tell(name: str, context: FunctionContext, state: CaptureState, *args: Value) -> Value:
    context.told[name] = [*args]
    return ConstantValue(None)


class FunctionContext(MethodOwner, InstanceValue):
    """``ctx``: what forward leaves for backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        super().__init__(FunctionCtx, None, None)
        self.needs_input_grad = needs_input_grad
        self.told: dict[str, list[Value]] = {}

    def get_attribute(self, state: CaptureState, name: str) -> Value:
        if name == "needs_input_grad" and name not in self.changes:
            return state.from_constant(self.needs_input_grad)
        if name == "saved_tensors":
            return SequenceValue(list(self.told.get("save_for_backward", ())), tuple)
        return super().get_attribute(state, name)

    methods: ClassVar = {
        name: functools.partial(_tell, name)
        for name in [
            *("save_for_backward", "save_for_forward", "mark_dirty"),
            *("mark_non_differentiable", "set_materialize_grads"),
        ]
    }
