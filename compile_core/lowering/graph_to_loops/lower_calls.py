"""Emitting calls of torch's own kernels: where results go, what a matrix product takes over from others."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.loops import View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import OUT_VARIANTS, out_variant
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import (
    ProgramBuilder,
    pointwise,
    static_spec,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Affine, Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_plan import GraphPlan, in_place_variant, takes_over
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor

aten = torch.ops.aten


def lower_call(builder: ProgramBuilder, plan: GraphPlan, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Emits the call of a node's operator; returns its result or, for several, a list of them."""
    target, fake, place = node.target, node.meta.get("val"), plan.places.get(node)
    if not isinstance(target, (torch._ops.OpOverload, KeptCall)):
        raise Unsupported("unknown-call", f"the graph calls {target}, which is no torch operator")
    if node in plan.bare:
        return _product_plus_bias(builder, node, args)
    if node in plan.wide:
        return _wide_product(builder, node, args, place)
    in_place = in_place_variant(node)
    if in_place is not None and isinstance(fake, torch.Tensor):
        if takes_over(node, plan):
            changed = args[0]
        else:
            place = place or builder.new_like(node.name, fake)
            builder.store_into(place, args[0])
            changed = builder.in_memory(place, tuple(fake.stride()), node.name)
        builder.call(in_place, (changed, *args[1:]), kwargs, (None,), {}, node.name)
        return changed
    single = isinstance(fake, torch.Tensor)
    if single and not isinstance(target, KeptCall) and (target in OUT_VARIANTS or place is not None):
        variant = out_variant(target)
        factor = plan.factors.get(node)
        if variant is not None and factor is not None:
            place = place or builder.new_like(node.name, fake)
            result = builder.in_memory(place, tuple(fake.stride()), node.name)
            scaling = {"beta": 0, "alpha": factor}
            builder.call(aten.addmm.out, (result, *args), scaling, (None,), {"out": place}, node.name)
            return result
        if variant is not None:
            place = place or builder.new_like(node.name, fake)
            builder.call(variant, args, kwargs, (None,), {"out": place}, node.name)
            return builder.in_memory(place, tuple(fake.stride()), node.name)
    readers = [user for user in node.users if user.target is operator.getitem and user in plan.alive]
    used = [user.args[1] for user in readers]
    fakes = _results_as_laid_out(builder, node, args, kwargs)
    values: list[Any] = []
    names: list[str | None] = []
    for position, result in enumerate(fakes):
        wanted = node.name if single else f"{node.name}_{position}"
        if isinstance(result, torch.Tensor) and (single or position in used):
            view = builder.new_buffer(wanted, static_spec(result, node.name))
            values.append(builder.in_memory(view, view.stride, node.name))
            names.append(view.buffer)
        else:
            values.append(result)
            names.append(None)
    builder.call(target, args, kwargs, names or (None,), {}, node.name)
    if single and place is not None:
        builder.store_into(place, values[0])
        values[0].view = place
    return values[0] if single else values


def _results_as_laid_out(builder: ProgramBuilder, node: torch.fx.Node, args: Any, kwargs: Any) -> list[Any]:
    """Fake results for the strides that the arguments have in memory.

    Torch's kernels lay out results like arguments, and a value that was traced with gaps between its rows, as a strided
    input that the program changes, is made without.
    """
    fake = node.meta.get("val")
    fakes = (
        [fake] if isinstance(fake, torch.Tensor) else list(fake) if isinstance(fake, (tuple, list)) else []
    )
    given = tree_leaves((args, kwargs))
    views = {k: builder.realise(value) for k, value in enumerate(given) if isinstance(value, LazyTensor)}
    traced: list[Any] = [
        value.meta["val"] if isinstance(value, torch.fx.Node) else None
        for value in tree_leaves((node.args, node.kwargs))
    ]
    if not isinstance(node.target, torch._ops.OpOverload) or all(
        view.has_strides(traced[k].stride()) for k, view in views.items()
    ):
        return fakes
    mode = next(traced[k] for k in views).fake_mode

    def as_laid_out(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        view = builder.realise(value)
        return torch.empty_strided(view.shape, view.stride, dtype=value.dtype, device=value.device)

    with mode:
        results = node.target(*tree_map(as_laid_out, args), **tree_map(as_laid_out, kwargs))
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _wide_product(builder: ProgramBuilder, node: torch.fx.Node, args: Any, place: View | None) -> LazyTensor:
    fake = node.meta["val"]
    spec = TensorSpec.contiguous(tuple(fake.shape), torch.float32, fake.device)
    place = place or builder.new_buffer(node.name, spec)
    builder.call(aten.mm.dtype_out, (*args, torch.float32), {}, (None,), {"out": place}, node.name)
    return builder.in_memory(place, tuple(fake.stride()), node.name)


def _product_plus_bias(builder: ProgramBuilder, node: torch.fx.Node, args: Any) -> LazyTensor:
    bias, left, right = args
    fake = node.meta["val"]
    place = builder.new_like(node.name, fake)
    builder.call(aten.mm.out, (left, right), {}, (None,), {"out": place}, node.name)
    product = builder.in_memory(place, place.stride, node.name)

    def emit(emitter: Emitter, index: Index) -> int:
        # One element may be the bias of all columns.
        column: Index = (Affine(),) if bias.shape[0] == 1 else index[1:]
        values = (emitter.element(product, index), emitter.element(bias, column))
        return emitter.apply("add", values, emitter.dtype_of(values[0]))

    return pointwise(fake, node.name, emit, Cost(product.current_cost().reads | bias.current_cost().reads, 1))
