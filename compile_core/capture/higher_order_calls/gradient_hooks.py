"""``Tensor.register_hook`` on what the graph computes: the function becomes a body, which autograd calls.

It may neither change the gradient in place nor anything else, and what it gives must be computed of the gradient: where
none arrives it is not called. Hooks on leaves that were there before, also those called after their gradient is added,
are registered once the graph has run: no gradient comes earlier. Handles that are used end the graph.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.hooks import RemovableHandle

from gradsplit.compile_core.capture.higher_order_calls.bodies import BodyGraph, body_argument, body_graph
from gradsplit.compile_core.capture.object_model.hooked_results import HookInGraph
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.tensors import METHOD_RULES, TensorValue, method_rule
from gradsplit.compile_core.capture.values.view_copies import version_of
from gradsplit.compile_core.ir import higher_order


class HookHandle(Value):
    """What the program gets, and as a rule drops."""

    def python_type(self) -> type:
        return RemovableHandle


@method_rule("register_hook")
def _register_hook(state: CaptureState, tensor: TensorValue, hook: Value) -> Value | None:
    fake = tensor.fake
    if (later := _register_later("register_hook", state, tensor, hook)) is not None:
        return later
    own = tensor.source is None and tensor.node.graph is state.graph.graph and not fake.is_leaf
    if not own or isinstance(state.graph, BodyGraph) or torch.is_autocast_enabled(fake.device.type):
        return None
    with body_graph(state) as graph:
        # As in a backward, whose own mode it is: one that is to be differentiated has gradients, hooks and all.
        with torch.no_grad():
            with graph.fake_mode:
                gradient = body_argument(state, graph, tensor, torch.empty_like(fake))
            result = hook.call(state, [gradient], {})
        if gradient.fake._version:
            raise state.unsupported("gradient-hook", "a hook that changes the gradient in place")
        if is_none(result):
            return HookHandle()
        if not isinstance(result, TensorValue) or not gradient.node.users:
            raise state.unsupported("gradient-hook", f"a hook that returns {result.describe()}")
        body = graph.close([result.node])
    nodes = [tensor.node, state.graph.hold("hook", body), *graph.lifted]
    state.call_tensor_nodes(higher_order.hook_gradient, nodes, lambda *given: None)
    node = next(reversed(tensor.node.users))
    state.hooks_in_graph.append(HookInGraph(node, tensor, hook, version_of(tensor.node)))
    return HookHandle()


@method_rule("retain_grad")
def _retain(state: CaptureState, tensor: TensorValue) -> Value | None:
    """Told to the result, which gets the gradients of what the graph computes of it where the graph is cut there.

    Not to a view: what it is a view of may have been changed by then, which leaves the view another history, or none.
    """
    if tensor.fake.requires_grad and not tensor.get_attribute(state, "is_leaf").truth(state):
        if isinstance(state.graph, BodyGraph) or tensor.fake._is_view():
            return None
        state.graph.required_options["linked_results"] = True
        state.effects.message_given(torch.Tensor.retain_grad, [tensor])
    elif not tensor.fake.requires_grad:
        message = "can't retain_grad on Tensor that has requires_grad=False"
        raise state.raise_exception(RuntimeError, message)
    return ConstantValue(None)


def _register_later(method: str, state: CaptureState, tensor: TensorValue, hook: Value) -> Value | None:
    """Of a leaf that was there before; None of other tensors."""
    given = tensor.source is not None and tensor.real is not None and tensor.fake.requires_grad
    if not given or not tensor.get_attribute(state, "is_leaf").truth(state):
        return None
    state.effects.message_given(lambda leaf, function: getattr(leaf, method)(function), [tensor, hook])
    return HookHandle()


_AFTER_IT_IS_ADDED = "register_post_accumulate_grad_hook"
METHOD_RULES[_AFTER_IT_IS_ADDED] = functools.partial(_register_later, _AFTER_IT_IS_ADDED)
