"""Autograd's engine: the backward that runs, its nodes, and what they have saved."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.variable import Variable

from gradsplit.compile_core.torch_facts.private_parts import private

current_graph_task_id = private(
    "torch._C:_current_graph_task_id", "the number of the backward that runs in this thread"
)
will_engine_execute_node = private(
    "torch._C:_will_engine_execute_node", "whether the backward that runs reaches a node"
)
current_autograd_node = private("torch._C:_current_autograd_node", "the node that runs")
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
top_saved_tensors_hooks = private(
    "torch._C:_autograd._top_saved_tensors_default_hooks", "whether hooks of saved tensors are set"
)
storage_use_count = private("torch._C:_storage_Use_Count", "whether anyone else still holds memory of ours")
foreach_copy = private("torch:_foreach_copy_", "copying many tensors in one call")

SingleLevelFunction = private(
    "torch.autograd.function:_SingleLevelFunction", "capturing calls of autograd.Function"
)
register_hook_dict = private(
    "torch.autograd.function:BackwardCFunction._register_hook_dict", "hooks of a compiled program's results"
)


def call_after_backward(callback: Callable[[], None]) -> None:
    """The engine calls it when the backward that runs has ended."""
    Variable._execution_engine.queue_callback(callback)
