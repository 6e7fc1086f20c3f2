"""Linear layers of one input are computed as one product, where a GPU would hardly be busy with each.

The products of queries, keys and values have one left operand, and each has two more in the backward, where the
input's gradient is a sum of three. Joined, they start a third of the kernels: a step of BERT took 15.4 instead of 16.7
ms on an H200; recorded in CUDA graphs, where a start costs little, it took the same. The weights follow one another in
one matrix, which autocast's cast writes anyway, and the results are parts of its columns, as of models that are written
with one layer for the three; gradients are brought together in one copy, which a bias's sum reads.

Left alone are layers whose weights the program computes, whatever is changed in place, and results whose layout
something may see: the program's caller, or an operator that is not torch's own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.captured_graphs.attention_calls import is_attention
from gradsplit.compile_core.autograd.captured_graphs.calls import call_arguments, call_name
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module, rewrite_with_bodies
from gradsplit.compile_core.autograd.captured_graphs.static_tensors import unchanged_tensor
from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS

# A product with more keeps a GPU busy by itself, and the copy of its gradient costs more than what joining saves.
_MOST_RESULTS = 1 << 25
_LEAST_ROWS = 256
# Layers further apart are of different parts of a model, whose gradients are not wanted at one time.
_MOST_BETWEEN = 24
# Kernels read 16 bytes at once.
_ALIGNED = 8
# What sees where elements lie, or gives them away.
_LAYOUT_READERS = frozenset({"as_strided", "data", "set_"})


def join_linears(module: GraphModule) -> GraphModule:
    """The captured graph with such layers joined, also in its bodies; ``module`` itself stays as it is."""
    return rewrite_with_bodies(module, _join_own)


def _join_own(module: GraphModule) -> GraphModule:
    joined = [nodes for nodes in _groups(module) if _is_worth(nodes)]
    if not joined:
        return module
    changed = copy_module(module)
    copies = dict(zip(module.graph.nodes, changed.graph.nodes, strict=True))
    for nodes in joined:
        _join([copies[node] for node in nodes])
    return changed


def _groups(module: GraphModule) -> list[list[Node]]:
    """Layers that can be joined, in the order of the program."""
    groups: defaultdict[Any, list[list[Node]]] = defaultdict(list)
    last: dict[Any, int] = {}
    for position, node in enumerate(module.graph.nodes):
        key = _joins_by(node)
        if key is None:
            continue
        if key not in last or position - last[key] > _MOST_BETWEEN:
            groups[key].append([])
        groups[key][-1].append(node)
        last[key] = position
    return [nodes for of_key in groups.values() for nodes in of_key]


def gain(weight_dtype: torch.dtype, results: Sequence[Tensor]) -> bool:
    """Whether products with these results gain from being one.

    Where no cast writes the weights anyway, they would be copied, and gradients would be parts of one tensor's memory.
    """
    rows, columns = prod(results[0].shape[:-1]), sum(result.shape[-1] for result in results)
    is_on_tensor_cores = results[0].device.type == "cuda" and results[0].dtype in HALF_FLOATS
    is_small = rows >= _LEAST_ROWS and rows * columns <= _MOST_RESULTS
    return is_on_tensor_cores and is_small and weight_dtype != results[0].dtype


def _joins_by(node: Node) -> Any:
    """What layers that can be joined have in common; None of what is no such layer."""
    if node.target is not F.linear or len(node.args) + len(node.kwargs) > 3:
        return None
    source, weight, bias = _arguments(node)
    if any(given is not None and not isinstance(given, Node) for given in (source, weight, bias)):
        return None
    of_source, of_weight, result = unchanged_tensor(source), unchanged_tensor(weight), unchanged_tensor(node)
    of_bias = unchanged_tensor(bias) if bias is not None else of_weight
    if of_source is None or of_weight is None or of_bias is None or result is None:
        return None
    if not {weight.op, weight.op if bias is None else bias.op} <= {"placeholder", "get_attr"}:
        return None
    if of_weight.dim() != 2 or of_bias.dtype != of_weight.dtype or of_weight.shape[0] % _ALIGNED:
        return None
    if not _is_read_by_value(node, torch.empty_strided(result.shape, _wider(result), device="meta")):
        return None
    return source, of_weight.dtype, of_weight.requires_grad, result.dtype, result.requires_grad


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    given = call_arguments(node, ("input", "weight", "bias"))
    return given["input"], given["weight"], given.get("bias")


def _wider(result: Tensor) -> list[int]:
    """The strides of a result that is a part of wider rows."""
    return [stride * 2 if k < result.dim() - 1 else 1 for k, stride in enumerate(result.stride())]


def _is_read_by_value(node: Node, laid_out: Any) -> bool:
    """Whether all that reads a result, or a view of it, computes something of its elements, wherever these lie.

    Args:
        laid_out: meta tensors as the result would be.
    """
    storages = _storages(node)
    for user in node.users:
        if user.op == "output" or not _is_torchs(user) or not _storages(user):
            return False
        if storages.isdisjoint(_storages(user)):
            continue
        if user.all_input_nodes != [node] or _name(user) in _LAYOUT_READERS:
            return False
        try:
            viewed = _called(user, laid_out)
        except (RuntimeError, TypeError):  # only rows that follow one another have this view
            return False
        if not _is_read_by_value(user, viewed):
            return False
    return True


def _storages(node: Node) -> set[int]:
    """Of the tensors that a node holds; none where it holds anything else."""
    example = node.meta.get("example_value")
    held = list(example) if isinstance(example, tuple | list) else [example]
    tensors = [each for each in held if isinstance(each, Tensor) and each.layout is torch.strided]
    return {each.untyped_storage()._cdata for each in tensors} if len(tensors) == len(held) else set()


def _called(view: Node, laid_out: Any) -> Any:
    arguments = map_arg(view.args, lambda _: laid_out)
    if view.op == "call_method":
        return getattr(laid_out, str(view.target))(*arguments[1:], **view.kwargs)
    assert callable(view.target)
    return view.target(*arguments, **view.kwargs)


def _name(node: Node) -> str:
    """Of the method, function or attribute."""
    return str(node.args[1]) if node.target is getattr else call_name(node)


def _is_torchs(node: Node) -> bool:
    """Whether a call is one of torch's methods or functions, or of Python's operators."""
    if node.op == "call_method" or is_attention(node):
        return True
    if node.op != "call_function" or isinstance(
        node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket
    ):
        return False
    home = getattr(node.target, "__module__", None) or ""
    is_builtin = node.target is getattr(torch, _name(node), None) or node.target is getattr
    return is_builtin or home.split(".")[0] in ("torch", "_operator")


def _is_worth(nodes: Sequence[Node]) -> bool:
    weights = {_arguments(node)[1] for node in nodes}
    dtype = next(iter(weights)).meta["example_value"].dtype
    return 1 < len(weights) == len(nodes) and gain(dtype, [node.meta["example_value"] for node in nodes])


def _join(nodes: Sequence[Node]) -> None:
    """Puts one layer in the place of the first, and parts of its result in the places of all."""
    first, graph = nodes[0], nodes[0].graph
    source, weights, biases = (
        _arguments(first)[0],
        *zip(*(_arguments(node)[1:] for node in nodes), strict=True),
    )
    results = [node.meta["example_value"] for node in nodes]
    columns = [result.shape[-1] for result in results]

    def add(function: Any, *arguments: Any, **given: Any) -> Node:
        node = graph.call_function(function, arguments, given)
        examples = map_arg((arguments, given), lambda node: node.meta["example_value"])
        node.meta["example_value"] = function(*examples[0], **examples[1])
        return node

    with graph.inserting_before(first):
        weight = add(torch.cat, list(weights))
        bias = None
        if any(each is not None for each in biases):
            filled = [
                add(torch.Tensor.new_zeros, each_weight, length) if each is None else each
                for each, each_weight, length in zip(biases, weights, columns, strict=True)
            ]
            bias = add(torch.cat, filled)
        wide = graph.call_function(F.linear, (source, weight, bias))
        shape = (*results[0].shape[:-1], sum(columns))
        wide.meta["example_value"] = results[0].new_empty(shape).requires_grad_(results[0].requires_grad)
        parts = add(torch.split, wide, columns, -1)
        own = [add(operator.getitem, parts, k) for k in range(len(nodes))]
    for node, part in zip(nodes, own, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
