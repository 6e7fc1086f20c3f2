"""Hooks that the graph contains, on tensors that turn out to be its results.

Others that are registered once the graph has run, by the rest of the program or by its caller, would be called before
those. So where nothing else in the graph reads such a tensor its hooks are taken out of the graph, and registered on
the result.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch.fx import Node

from gradsplit.compile_core.capture.object_model.functions import FunctionValue
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.capture.values.view_copies import version_of


@dataclass(frozen=True)
class HookInGraph:
    """``node`` calls ``hook`` with the gradient of ``tensor``, whose version it had been registered at."""

    node: Node
    tensor: TensorValue
    hook: Value
    version: int

    @property
    def may_be_outside(self) -> bool:
        _, _, *lifted = self.node.all_input_nodes
        is_changed = version_of(self.tensor.node) != self.version
        reads_inputs = all(node.op == "placeholder" for node in lifted)
        return isinstance(self.hook, FunctionValue) and reads_inputs and not is_changed


def take_hooks_of_results(state: CaptureState, results: Container[Node]) -> list[tuple[TensorValue, Value]]:
    """Tensors, with a hook that is to be registered on each, in order; the graph has them no more."""
    hooks: dict[Node, list[HookInGraph]] = {}
    for hook in state.hooks_in_graph:
        hooks.setdefault(hook.tensor.node, []).append(hook)
    taken = []
    for node, own in hooks.items():
        is_read = not node.users.keys() <= {hook.node for hook in own}
        if node not in results or is_read or not all(hook.may_be_outside for hook in own):
            continue
        for hook in own:
            _, body, *_ = hook.node.all_input_nodes
            hook.node.graph.erase_node(hook.node)
            if not body.users:
                body.graph.erase_node(body)
            taken.append((hook.tensor, hook.hook))
    return taken
