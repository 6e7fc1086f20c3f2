"""``torch.autograd.grad`` and ``backward`` in captured code.

To autograd the fake tensors of a capture have the history that the program's have. So one node asks it for gradients,
there as in the trace of the graph, which records the operators of a backward as all others. ``backward`` is that for
all leaves that it comes to, and then a store to ``.grad``, or a change of it in place, as any other in the program.

The graph ends where more hangs on a backward than values: history from outside of the graph, hooks, gradients that
share memory. It ends, too, where the program accumulates gradients with a history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gradsplit.compile_core.capture.torch_rules.gradients import guard_leaf, read_gradient
from gradsplit.compile_core.capture.torch_rules.modes import grad_mode
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.call_rules import answer_to
from gradsplit.compile_core.capture.values.constants import ConstantValue, is_none
from gradsplit.compile_core.capture.values.tensors import TensorValue, method_rule
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.higher_order import checkpoint
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import (
    gather_specially,
    is_hooked_where_it_accumulates,
    leaves_behind,
)
from gradsplit.compile_core.torch_facts.torch_switches import backwards_are_watched
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper

# Why a graph ends where the program asks for gradients, and the options that the graph then needs: gradients that will
# be differentiated, and gradients with respect to values of the graph itself, which autograd must find between results.
REQUIRED_OPTIONS: dict[str, dict[str, bool]] = {
    "autograd-call-create-graph": {"double_backward": True},
    "autograd-call-between-results": {"linked_results": True},
    "autograd-call-create-graph-between-results": {"double_backward": True, "linked_results": True},
}

_NONE, _FALSE = ConstantValue(None), ConstantValue(False)
_OPTIONS = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")


@answer_to(torch.autograd.grad)
def _grad(state: CaptureState, outputs: Value, inputs: Value, *given: Value, **named: Value) -> Value:
    options = {**dict(zip(_OPTIONS, given, strict=False)), **named}
    seeds, create_graph = options.pop("grad_outputs", _NONE), options.get("create_graph", _FALSE)
    call = _Call(state, outputs, seeds, create_graph, inputs)
    if len(given) > len(_OPTIONS) or options.get("is_grads_batched", _FALSE).truth(state):
        raise call.refused("in batches")
    call.check_leaves([tensor for tensor in call.inputs if tensor.fake.is_leaf])
    return call.gradients(call.inputs, options)


@answer_to(torch.autograd.backward)
def _backward(
    state: CaptureState,
    tensors: Value,
    grad_tensors: Value = _NONE,
    retain_graph: Value = _NONE,
    create_graph: Value = _FALSE,
    grad_variables: Value = _NONE,
    inputs: Value = _NONE,
) -> None:
    call = _Call(state, tensors, grad_tensors, create_graph, inputs)
    if create_graph.truth(state) or not is_none(grad_variables):
        raise call.refused("to be accumulated with a history")
    if state.data_reads.ends_at_backwards:
        raise call.refused("where CUDA graphs are recorded")
    leaves = call.inputs or call.leaves
    if not all(leaf.fake.is_leaf for leaf in leaves):
        raise call.refused("to be accumulated in what is no leaf")
    call.check_leaves(leaves)
    options = {"retain_graph": retain_graph, "allow_unused": ConstantValue(True)}
    held = [*state.tensor_of_fake.values()]
    gradients = state.items_of(call.gradients(leaves, options))
    held += [gradient for gradient in gradients if isinstance(gradient, TensorValue)]
    if any(value.fake.layout is not torch.strided or is_wrapper(value.fake) for value in held):
        raise call.refused("beside tensors of other layouts, or such as wrap others")
    holders = Counter(map(id, held))
    memory = {id(value): value.fake.untyped_storage()._cdata for value in held}
    sharing = Counter(memory[id(value)] for value in held)
    with grad_mode(state, False):
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if not isinstance(gradient, TensorValue):
                continue
            kept = read_gradient(state, leaf)
            if not is_none(kept):
                kept.call_method(state, "add_", [gradient], {})
                continue
            # Autograd stores a copy where somebody else holds it, or it lies in another order than the leaf.
            own = gradient
            if holders[id(gradient)] > 1 or not _lies_as(gradient.fake, leaf.fake):
                own = _copy_like(state, leaf, gradient)
            elif sharing[memory[id(gradient)]] > 1:
                raise call.refused("that lie in the memory of one another, or of what they come of")
            if leaf.real is not None and leaf.real.grad is not None:
                state.effects.freed_gradients.append(leaf)
            leaf.changes["grad"] = own
            state.effects.attribute_changed(leaf, "grad")


@method_rule("backward")
def _backward_of(state: CaptureState, tensor: TensorValue, *given: Value, **named: Value) -> Value:
    options = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), given, strict=False)) | named
    _backward(state, tensor, options.pop("gradient", _NONE), **options)
    return _NONE


def _lies_as(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    if not TensorSpec.of(leaf).is_dense:
        return gradient.is_contiguous()
    strides = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(size == 1 or own == of_leaf for size, own, of_leaf in strides)


def _copy_like(state: CaptureState, leaf: TensorValue, gradient: TensorValue) -> Value:
    if not TensorSpec.of(leaf.fake).is_dense:
        row_major = ConstantValue(torch.contiguous_format)
        return gradient.call_method(state, "clone", [], {"memory_format": row_major})
    made = state.call_torch(torch.empty_like, leaf)
    return made.call_method(state, "copy_", [gradient], {})


def _is_reentrant(node: Any) -> bool:
    return node.target is checkpoint and node.args[1].meta["example_value"].use_reentrant


def _has_outer_history(record: Any) -> bool:
    return isinstance(record.real, torch.Tensor) and record.real.requires_grad and not record.real.is_leaf


class _Call:
    """What gradients are asked for. Raises Unsupported where they are more than a node of the graph."""

    def __init__(
        self, state: CaptureState, outputs: Value, seeds: Value, create_graph: Value, inputs: Value
    ) -> None:
        self._state, self._seeds, self._reason = state, seeds, "autograd-call"
        if create_graph.truth(state):
            self._reason += "-create-graph"
        self.inputs = [] if is_none(inputs) else self._tensors(inputs)
        if any(self._has_history(tensor) for tensor in self.inputs):
            self._reason += "-between-results"
        self._outputs = self._tensors(outputs)
        if state.graph.is_body:
            raise self.refused("in a function that becomes a graph of its own")
        if state.graph.required_options.get("linked_results"):
            raise self.refused("beside those of tensors that retain them")
        if any(map(_is_reentrant, state.graph.graph.nodes)):
            raise self.refused("through a reentrant checkpoint")
        if backwards_are_watched():
            raise self.refused("while hooks see what is saved, or anomalies are looked for")
        state.guards.add([], "not {c0}()", [backwards_are_watched], "backwards are not watched")
        behind = leaves_behind([tensor.fake for tensor in self._outputs])
        self.leaves = [state.tensor_of_fake[id(leaf)] for leaf in behind if id(leaf) in state.tensor_of_fake]
        ends_outside = len(self.leaves) < len(behind) or any(map(_has_outer_history, state.graph.records))
        if ends_outside and (is_none(inputs) or any(t.node.op == "placeholder" for t in self.inputs)):
            raise self.refused("that flow through what was computed before the graph")
        sources = [guard_leaf(state, leaf) for leaf in self.leaves if leaf.source is not None]
        if len(sources) > 1:
            state.guards.all_distinct(sources, [])

    def refused(self, why: str) -> Unsupported:
        hint = "leave the backward out of the compiled function, or use torch.func.grad"
        return self._state.unsupported(self._reason, f"gradients are asked for in captured code, {why}", hint)

    def _tensors(self, given: Value) -> list[TensorValue]:
        listed = [given] if isinstance(given, TensorValue) else self._state.items_of(given)
        tensors = [value for value in listed if isinstance(value, TensorValue)]
        if not tensors or len(tensors) < len(listed):
            raise self.refused(f"of {given.describe()}")
        return tensors

    def _has_history(self, tensor: TensorValue) -> bool:
        """Whether the graph computes it, or changes an input that it is."""
        graph = self._state.graph
        changed = (record.node for record in graph.records if graph.is_changed(record))
        return tensor.node.op != "placeholder" or tensor.node in changed

    def check_leaves(self, leaves: Sequence[TensorValue]) -> None:
        """Refuses hooks of leaves that were there before, which nobody calls in a graph."""
        state = self._state
        given = [leaf for leaf in leaves if leaf.real is not None and leaf.real.requires_grad]
        real: list[Any] = [leaf.real for leaf in given]
        later = [value for _, arguments in state.effects.messages for value in arguments]
        hooked = any(leaf is value for leaf in given for value in later)
        if hooked or gather_specially(*real) or any(map(is_hooked_where_it_accumulates, real)):
            raise self.refused("of tensors with hooks")
        names = ", ".join(f"{{{position}}}" for position in range(len(given)))
        sources = [leaf.source for leaf in given if leaf.source is not None]
        state.guards.add(sources, f"not {{c0}}({names})", [gather_specially], "leaves have no hooks")

    def gradients(self, inputs: Sequence[TensorValue], options: dict[str, Value]) -> Value:
        given = (tuple(self._outputs), tuple(inputs), self._seeds)
        return self._state.call_torch(torch.autograd.grad, *given, **options)
