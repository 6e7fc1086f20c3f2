"""Costs of operators, told from fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gradsplit.compile_core.autograd.operators.costs import moved_bytes, operations_of, result_bytes
from gradsplit.compile_core.ir.row_chunks import ADD_PRODUCT, WIDE_PRODUCT

aten = torch.ops.aten


def call(target: Any, *values: Any, result: Any) -> Node:
    graph = Graph()
    arguments = []
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            arguments.append(graph.placeholder(f"input_{position}"))
            arguments[-1].meta["val"] = value
        else:
            arguments.append(value)
    node = graph.call_function(target, tuple(arguments))
    node.meta["val"] = result
    return node


def test_products_and_what_only_moves() -> None:
    with FakeTensorMode():
        left, right = torch.empty(5, 7), torch.empty(7, 9)
        product = call(aten.mm.default, left, right, result=left @ right)
        total = call(aten.add.Tensor, left, left, result=left + left)
        added = call(ADD_PRODUCT, left @ right, left, right, result=left @ right)
        wide = call(WIDE_PRODUCT, left, right, result=left @ right)
    assert operations_of(added) == operations_of(wide) == operations_of(product)
    assert operations_of(product) == 2 * 5 * 7 * 9
    assert moved_bytes(product) == 4 * (5 * 7 + 7 * 9 + 5 * 9)
    assert operations_of(total) == 0


def test_several_results() -> None:
    with FakeTensorMode():
        x = torch.empty(6, 4)
        node = call(aten.sort.default, x, result=list(torch.sort(x)))
    assert result_bytes(node) == 24 * (4 + 8)


def test_open_sizes_count_as_they_are_and_become_no_condition() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dims: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    left = mode.from_tensor(torch.empty(5, 7), symbolic_context=dims)
    right = mode.from_tensor(torch.empty(7, 9), symbolic_context=dims)
    product = call(aten.mm.default, left, right, result=left.new_empty(left.shape[0], right.shape[1]))
    assert operations_of(product) == 2 * 5 * 7 * 9
    assert moved_bytes(product) == 4 * (5 * 7 + 7 * 9 + 5 * 9)
    assert not env.guards


def test_what_a_formula_refuses_has_no_operations() -> None:
    with FakeTensorMode():
        queries, keys = torch.empty(2, 8, 4, 16), torch.empty(2, 3, 4, 16)
    attention = aten._scaled_dot_product_flash_attention.default
    assert operations_of(call(attention, queries, keys, keys, result=[queries])) == 0
