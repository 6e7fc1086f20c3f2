"""Gives the results of a traced graph the strides that they have in eager.

Functionalization changes strides: what eager writes into a row-major tensor through a transposed view, the functional
graph computes transposed. A program sees the strides of its results, and views of them are made by these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import add_call
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten


def keep_layouts(module: GraphModule, specs: Sequence[TensorSpec]) -> GraphModule:
    """Inserts copies of the first results where their layout is not that of ``specs``; changes ``module``.

    Raises:
        Unsupported: a result must have strides that no copy gives it, as those of an expanded tensor.
    """
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for position, spec in enumerate(specs):
            if TensorSpec.of(results[position].meta["val"]).is_laid_out_as(spec):
                continue
            if not spec.is_dense:
                raise Unsupported(
                    "result-layout", f"the graph does not make a result with strides {spec.stride}"
                )
            results[position] = _copied(results[position], spec)
    output.args = (tuple(results),)
    module.recompile()
    return module


def _copied(value: Node, spec: TensorSpec) -> Node:
    """A copy with the strides of ``spec``: row-major in the order of its memory."""
    order, back = spec.memory_order
    copy = add_call(value.graph, None, aten.permute.default, value, order)
    copy = add_call(value.graph, None, aten.clone.default, copy, memory_format=torch.contiguous_format)
    return add_call(value.graph, None, aten.permute.default, copy, back)
