"""Calls of attention in captured graphs, with other arguments than the program gave, and results laid out as it saw.

Torch lays out the result as the kernel does that it chooses for the arguments, and the program may have relied on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.functional import scaled_dot_product_attention

from gradsplit.compile_core.autograd.captured_graphs.calls import call_arguments, call_name
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module, rewrite_with_bodies
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, in_memory_order

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_REPETITIONS = frozenset(
    {"reshape", "view", "flatten", "repeat_interleave", "expand", "getitem", "unsqueeze"}
)


def attention_laid_out(*, strides: tuple[int, ...], mask_in_rows: bool = False, **arguments: Any) -> Tensor:
    """``scaled_dot_product_attention`` whose result has these strides.

    Args:
        mask_in_rows: whether the mask is brought into row-major order first.
    """
    if mask_in_rows:
        arguments["attn_mask"] = arguments["attn_mask"].contiguous()
    result = scaled_dot_product_attention(**arguments)
    spec = TensorSpec(tuple(result.shape), strides, result.dtype, result.device)
    return result if TensorSpec.of(result).is_laid_out_as(spec) else in_memory_order(result, spec)


def is_attention(node: Node) -> bool:
    return node.target in (scaled_dot_product_attention, attention_laid_out)


def attention_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call of attention by their names."""
    return call_arguments(node, _PARAMETERS)


def with_arguments(module: GraphModule, changes: Mapping[Node, Mapping[str, Any]]) -> GraphModule:
    """A copy of ``module`` in which these calls have other arguments of ``attention_laid_out``, by their names."""
    changed = copy_module(module)
    copies = dict(zip(module.graph.nodes, changed.graph.nodes, strict=True))
    for node, arguments in changes.items():
        call = copies[node]
        before = attention_arguments(call)
        call.target = attention_laid_out
        call.args, call.kwargs = (), {**before, **map_arg(dict(arguments), copies.__getitem__)}
        for source in dict.fromkeys(before[name] for name in arguments if isinstance(before.get(name), Node)):
            _erase_unread(source)
    return changed


def change_attention(module: GraphModule, changes_of: Callable[[Node], Mapping[str, Any]]) -> GraphModule:
    """The captured graph in which calls of attention, also in its bodies, have other arguments; ``module`` itself stays
    as it is, and is returned if none has.

    Args:
        changes_of: the arguments of ``attention_laid_out`` that differ from those of a call.
    """

    def change_own(module: GraphModule) -> GraphModule:
        changes = {node: changes_of(node) for node in module.graph.nodes if is_attention(node)}
        changes = {node: changed for node, changed in changes.items() if changed}
        return with_arguments(module, changes) if changes else module

    return rewrite_with_bodies(module, change_own)


def _erase_unread(node: Node) -> None:
    """Erases what repeated an argument and is read by nothing any more."""
    if node.users or call_name(node) not in _REPETITIONS:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)
