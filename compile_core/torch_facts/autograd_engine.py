"""Autograd's engine: the backward that runs, its nodes, and what they have saved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from gradsplit.compile_core.torch_facts.private_parts import private

current_graph_task_id = private(
    "torch._C:_current_graph_task_id", "the number of the backward that runs in this thread"
)
will_engine_execute_node = private(
    "torch._C:_will_engine_execute_node", "whether the backward that runs reaches a node"
)
current_autograd_node = private("torch._C:_current_autograd_node", "the node that runs")
numbers_given = private(
    "torch.autograd:_get_sequence_nr",
    "how many nodes a thread has made: reports name the user's line of a gradient",
    "reports do not name it",
    lambda: 0,
)
graph_task_keeps_graph = private(
    "torch._C:_autograd._get_current_graph_task_keep_graph",
    "whether the backward was called with retain_graph",
)
ImperativeEngine = private(
    "torch._C:_ImperativeEngine", "which gradients a backward was asked for, under data parallelism"
)
SavedTensor = private("torch._C:_autograd.SavedTensor", "reading what a node has saved one by one")
AutoDispatchBelowAutograd = private("torch._C:_AutoDispatchBelowAutograd", "recording an LSTM as its steps")
set_saved_tensors_hooks_tracing = private(
    "torch._C:_autograd._saved_tensors_hooks_set_tracing", "hooks of saved tensors while a graph is traced"
)
push_saved_tensors_hooks = private(
    "torch._C:_autograd._push_saved_tensors_default_hooks", "hooks of saved tensors in programs"
)
refuse_saved_tensors_hooks = private(
    "torch._C:_autograd._saved_tensors_hooks_disable", "disable_saved_tensors_hooks in programs"
)
allow_saved_tensors_hooks = private(
    "torch._C:_autograd._saved_tensors_hooks_enable", "disable_saved_tensors_hooks in programs"
)
why_no_saved_tensors_hooks = private(
    "torch._C:_autograd._saved_tensors_hooks_get_disabled_error_message",
    "disable_saved_tensors_hooks in programs",
)
top_saved_tensors_hooks = private(
    "torch._C:_autograd._top_saved_tensors_default_hooks", "whether hooks of saved tensors are set"
)
_origin_of_view = private(
    "torch._C:_autograd._get_creation_meta",
    "views that a program makes with gradients where it is called without",
)
storage_use_count = private("torch._C:_storage_Use_Count", "whether anyone else still holds memory of ours")
foreach_copy = private("torch:_foreach_copy_", "copying many tensors in one call")

SingleLevelFunction = private(
    "torch.autograd.function:_SingleLevelFunction", "capturing calls of autograd.Function"
)
register_hook_dict = private(
    "torch.autograd.function:BackwardCFunction._register_hook_dict", "hooks of a compiled program's results"
)


def is_made_with_gradients(view: torch.Tensor) -> bool:
    """Whether a view was made where gradients were on: others may not be changed in place where they are."""
    return _origin_of_view(view).name not in ("NO_GRAD_MODE", "INFERENCE_MODE")


def is_wanted(edge: tuple[Any, int]) -> bool:
    """Whether the backward that runs goes on along an edge of the node that runs."""
    node, _ = edge
    try:
        return node is not None and will_engine_execute_node(node)
    except RuntimeError:  # Torch's answer for a leaf whose gradient is to be returned.
        return True


def number_of_node(node: Any) -> int:
    """Which of the nodes that its thread has made it is; see ``numbers_given``."""
    return getattr(node, "_sequence_nr", int)()


def run_instead_of_backward(node: Any, run: Callable[..., Any]) -> None:
    """Has the engine call ``run(backward, context, *gradients)`` for a node whose backward is in Python."""
    function = getattr(node, "_forward_cls", None)
    if function is not None and not getattr(function, "boxed_grads_call", False):
        node._forward_cls = _InsteadOfFunction(function, run)


class _InsteadOfFunction:
    """Stands where a node has its ``autograd.Function``. It takes itself away when the backward runs."""

    def __init__(self, function: Any, run: Callable[..., Any]) -> None:
        self._backward = function.backward if function.vjp is Function.vjp else function.vjp
        self._run = run
        self.vjp = Function.vjp

    def backward(self, context: Any, *gradients: Any) -> Any:
        del context._forward_cls
        return self._run(self._backward, context, *gradients)


def reaching_roots(roots: Sequence[torch.Tensor]) -> dict[Any, int]:
    """For each node of autograd's graph that the roots lead to, the roots that do, as a bit set of positions."""
    following: dict[Any, list[Any]] = {}
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in following:
            following[node] = [after for after, _ in node.next_functions if after is not None]
            waiting += following[node]
    found = dict.fromkeys(reversed([*TopologicalSorter(following).static_order()]), 0)
    for position, root in enumerate(roots):
        if root.grad_fn is not None:
            found[root.grad_fn] |= 1 << position
    for node, positions in found.items():
        for after in following[node]:
            found[after] |= positions
    return found


def leaves_behind(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where a backward from these tensors would accumulate gradients."""
    found = {id(root): root for root in roots if root.requires_grad and root.grad_fn is None}
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [further for further, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found[id(leaf)] = leaf
    return list(found.values())


_hooks = operator.attrgetter("_backward_hooks")
_hooks_after = operator.attrgetter("_post_accumulate_grad_hooks")
# Since torch 2.10 a leaf may gather gradients of another dtype.
_own_dtype = operator.attrgetter("dtype")
_gathered_dtype = operator.attrgetter("grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype")


def gather_specially(*leaves: torch.Tensor) -> bool:
    """Whether any of them has a hook of its own, or gathers gradients of another dtype."""
    hooked = any(map(_hooks, leaves)) or any(map(_hooks_after, leaves))
    return hooked or [*map(_gathered_dtype, leaves)] != [*map(_own_dtype, leaves)]


def is_hooked_where_it_accumulates(leaf: torch.Tensor) -> bool:
    """Whether Python has hooks on the node where a leaf's gradients are added. Torch does not list them, but whoever
    registers one is given all."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    handles: list[Any] = [node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)]
    counts = [len(handle.hooks_dict_ref()) for handle in handles]
    for handle in handles:
        handle.remove()
    return counts != [1, 1]


def call_after_backward(callback: Callable[[], None]) -> None:
    """The engine calls it when the backward that runs has ended."""
    Variable._execution_engine.queue_callback(callback)


def backward_from(edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` without its checks of each gradient, which has the shape and dtype of its edge."""
    Variable._execution_engine.run_backward(
        tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# The transforms of ``torch.func`` that are active around a call.

is_batched_by_autograd = private(
    "torch._C._functorch:is_legacy_batchedtensor", "gradients that arrive in batches (is_grads_batched)"
)
top_transform = private("torch._C._functorch:peek_interpreter_stack", "calls inside torch.func's transforms")
is_wrapped_by_transform = private(
    "torch._C._functorch:is_functorch_wrapped_tensor", "calls inside torch.func's transforms"
)
are_transforms_active = private(
    "torch._C:_are_functorch_transforms_active", "calls inside torch.func's transforms"
)


# Autograd counts the changes of a tensor, to notice that one it has saved is no longer what it was.


def tell_of_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Counts a change of each, which autograd has not seen. What is made in inference mode has no versions."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# Leaves that are views of tensors without gradients: what is a view of them has that base, too.


def is_view_as_leaf(tensor: torch.Tensor) -> bool:
    """Whether a view of it that is made without gradients does not require any, though the tensor itself does."""
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad
