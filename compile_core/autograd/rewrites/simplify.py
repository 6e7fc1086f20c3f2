"""Cleans a traced graph before it is partitioned: no-ops and copies out, equal nodes merged, dead nodes dropped, and
numbers of the CPU computed that depend on constants alone.

Random operators are never merged or dropped: each advances torch's generator as eager would. Of two checkpoints neither
reads what is computed in the other, which would have to be saved for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gradsplit.compile_core.autograd.operators.graph_nodes import is_of_backward
from gradsplit.compile_core.autograd.operators.region_marks import mark_of
from gradsplit.compile_core.autograd.rewrites.drop_copies import drop_copies
from gradsplit.compile_core.autograd.rewrites.scatter_sums import join_scatter_sums
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.pooling import PLACES, POSITIONS
from gradsplit.compile_core.torch_facts.dispatcher import is_needed_unread, is_random

aten = torch.ops.aten

# Below autograd these only pass their argument on.
PASS_THROUGH = frozenset(
    {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
)


def simplify(module: GraphModule) -> GraphModule:
    """The same program with fewer nodes; changes ``module`` and returns it."""
    graph = module.graph
    seen: dict[Any, dict[int | None, Node]] = {}
    replaced: dict[Node, Node] = {}

    def current(value: Node) -> Node:
        return replaced.get(value, value)

    for node in list(graph.nodes):
        if not replaced.keys().isdisjoint(node.all_input_nodes):
            # All at once: where a node reads thousands, as the output does, the change of one takes as long as all.
            node.args, node.kwargs = map_arg(node.args, current), map_arg(node.kwargs, current)
        if node.op != "call_function":
            continue
        if node.target in PASS_THROUGH:
            replaced[node] = node.args[0]  # type: ignore[assignment]
            continue
        _as_view(node)
        _without_source(node)
        inverse = _undone(node)
        if inverse is not None:
            replaced[node] = inverse
            continue
        if is_random(node) or (_mutates(node) and not is_number(node)):
            continue
        number = _constant_number(module, node)
        if number is not None:
            replaced[node] = number
            continue
        key = _key(node)
        if key is None:
            continue
        twin = _find_twin(seen.setdefault(key, {}), node)
        if twin is not node:
            replaced[node] = twin
    for node in reversed(replaced):
        graph.erase_node(node)
    drop_copies(graph)
    join_scatter_sums(graph)
    graph.eliminate_dead_code(is_needed_unread)
    graph.lint()
    module.recompile()
    return module


def _find_twin(equal: dict[int | None, Node], node: Node) -> Node:
    """The equal node that stands for this one, or the node itself; ``equal`` has one for each checkpoint."""
    mark = mark_of(node)
    region = None if mark is None else mark.region
    if region is None and equal:
        return next(iter(equal.values()))
    return equal.get(None) or equal.setdefault(region, node)


def _as_view(node: Node) -> None:
    """Makes a view of what speaks of strides but only reshapes: ``as_strided`` of all of a contiguous tensor, and its
    gradient, which puts all of a tensor. Pooling to one pixel is traced so."""
    puts = node.target is aten.as_strided_scatter.default
    if not puts and node.target is not aten.as_strided.default:
        return
    base, *rest = node.args
    source: Any = rest.pop(0) if puts else base
    size, stride, *offset = (*rest, *node.kwargs.values())
    whole, put = base.meta["val"], source.meta["val"]  # type: ignore[union-attr]
    numbers: list[Any] = [*size, *stride, *whole.shape]  # type: ignore[misc]
    if any(offset) or not all(isinstance(number, int) for number in numbers):
        return
    window = torch.empty_strided(size, stride, device="meta")  # type: ignore[arg-type]
    if all(x.is_contiguous() and x.numel() == window.numel() for x in (window, whole, put)):
        node.target, node.kwargs = aten.view.default, {}
        node.args = (source, list(node.meta["val"].shape))


_FILLED_LIKE = {aten.full_like.default: None, aten.zeros_like.default: 0, aten.ones_like.default: 1}


def _without_source(node: Node) -> None:
    """A tensor filled like another reads nothing of it, which need not be kept for it. In a backward it tells on which
    gradients one depends."""
    value = node.meta.get("val")
    target: Any = node.target
    if target not in _FILLED_LIKE or is_of_backward(node) or not isinstance(value, torch.Tensor):
        return
    shape, fill = list(value.shape), _FILLED_LIKE[target]
    if all(isinstance(size, int) for size in shape) and value.is_contiguous():
        node.args = (shape, node.args[1] if fill is None else fill)
        node.kwargs = {
            "dtype": value.dtype,
            "layout": value.layout,
            "device": value.device,
            "pin_memory": False,
        }
        node.target = aten.full.default


# Operators and what undoes them, if given the same further arguments.
_INVERSES: Mapping[Any, Any] = {aten.t.default: aten.t.default, PLACES: POSITIONS}


def _undone(node: Node) -> Node | None:
    """The value that an operator and its inverse give back, as in ``x.t().t()``."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.target not in _INVERSES:
        return None
    if source.target is _INVERSES[node.target] and source.args[1:] == node.args[1:]:
        return source.args[0]  # type: ignore[return-value]
    return None


def _constant_number(module: GraphModule, node: Node) -> Node | None:
    """A constant in the place of a number that an operator computes from constants on the CPU, which kernels then have
    written into them."""
    value, constants = node.meta.get("val"), node.all_input_nodes
    if not (
        constants
        and all(source.op == "get_attr" for source in constants)
        and isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and not value._has_symbolic_sizes_strides  # as of what depends on data
        and value.numel() == 1
        and isinstance(node.target, torch._ops.OpOverload)
    ):
        return None
    tensors = {source: getattr(module, str(source.target)) for source in constants}
    with torch.no_grad():
        number = node.target(*map_arg(node.args, tensors.get), **map_arg(node.kwargs, tensors.get))
    name = f"_constant_of_{node.name}"
    module.register_buffer(name, number.clone(), persistent=False)
    with node.graph.inserting_before(node):
        constant = node.graph.get_attr(name)
    constant.meta["val"] = value
    return constant


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (schema is None and node.target is not operator.getitem) or bool(
        schema is not None and schema.is_mutable
    )


def _key(node: Node) -> Any:
    """A hashable description of operator and arguments, or ``None`` where there is none."""

    def freeze(value: Any) -> Any:
        if isinstance(value, Node):
            return value
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, tuple(freeze(item) for item in value))
        if isinstance(value, (dict,)):
            return ("dict", tuple((key, freeze(item)) for key, item in value.items()))
        # 1, 1.0 and True are equal but not the same argument; so are 0.0 and -0.0.
        return (type(value).__name__, repr(value) if isinstance(value, float) else value)

    key = (node.target, freeze(node.args), freeze(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
