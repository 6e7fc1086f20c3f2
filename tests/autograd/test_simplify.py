"""The clean-up of a traced graph."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from gradsplit.compile_core.autograd.rewrites.simplify import simplify
from tests.lowering.lowering_harness import trace

aten = torch.ops.aten


def simplified(build) -> list[str]:
    """The operators that remain of what ``build(graph, x)`` adds and returns."""
    graph = Graph()
    graph.output(tuple(build(graph, graph.placeholder("x"))))
    module = simplify(GraphModule({}, graph))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def call(graph, target, *arguments, **keywords):
    return graph.call_function(target, arguments, keywords)


def test_equal_nodes_are_merged():
    def build(graph, x):
        return [
            call(graph, aten.mul.Tensor, call(graph, aten.sin.default, x), call(graph, aten.sin.default, x))
        ]

    assert simplified(build) == ["aten.sin.default", "aten.mul.Tensor"]


def strided(*shape):
    return torch.empty(shape, device="meta")


def test_strides_of_a_whole_tensor_are_a_view():
    def build(graph, x):
        x.meta["val"] = strided(4, 6)
        flat = call(graph, aten.as_strided.default, x, [24], [1])
        part = call(graph, aten.as_strided.default, x, [4, 5], [6, 1])
        turned = call(graph, aten.as_strided.default, x, [6, 4], [1, 6])
        put = call(graph, aten.as_strided_scatter.default, flat, x, [4, 6], [6, 1], 0)
        shifted = call(graph, aten.as_strided_scatter.default, flat, part, [4, 5], [6, 1], 2)
        shapes = {flat: (24,), part: (4, 5), turned: (6, 4), put: (24,), shifted: (24,)}
        for node, shape in shapes.items():
            node.meta["val"] = strided(*shape)
        return list(shapes)

    view, kept = "aten.view.default", "aten.as_strided.default"
    assert simplified(build) == [view, kept, kept, "aten.as_strided_scatter.default"]


def test_equal_numbers_of_other_types_are_not_merged():
    def build(graph, x):
        numbers = (1, 1.0, True, 0.0, -0.0)
        return [call(graph, aten.mul.Tensor, x, number) for number in numbers]

    assert len(simplified(build)) == 5


def test_numbers_that_are_not_a_number_are_merged():
    def build(graph, x):
        return [call(graph, aten.add.Tensor, x, float("nan")) for _ in range(2)]

    assert len(simplified(build)) == 1


def test_random_operators_are_neither_merged_nor_dropped():
    def build(graph, x):
        for _ in range(2):
            call(graph, aten.rand_like.default, x)
        return [x]

    assert simplified(build) == ["aten.rand_like.default"] * 2


def test_unused_nodes_are_dropped():
    def build(graph, x):
        call(graph, aten.cos.default, call(graph, aten.sin.default, x))
        return [call(graph, aten.exp.default, x)]

    assert simplified(build) == ["aten.exp.default"]


def test_nodes_that_pass_on_their_argument_are_dropped():
    def build(graph, x):
        y = call(graph, aten.alias.default, call(graph, aten.detach.default, x))
        return [call(graph, aten.exp.default, y)]

    assert simplified(build) == ["aten.exp.default"]


def test_transposing_twice_is_nothing():
    def build(graph, x):
        return [call(graph, aten.exp.default, call(graph, aten.t.default, call(graph, aten.t.default, x)))]

    assert simplified(build) == ["aten.exp.default"]


def test_lists_and_keywords_tell_nodes_apart():
    def build(graph, x):
        return [
            call(graph, aten.sum.dim_IntList, x, [0]),
            call(graph, aten.sum.dim_IntList, x, [1]),
            call(graph, aten.sum.dim_IntList, x, [1], dtype=torch.float64),
        ]

    assert len(simplified(build)) == 3


def test_attention_is_random_with_dropout_only():
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default

    def build(graph, x):
        call(graph, attention, x, x, x)
        call(graph, attention, x, x, x, 0.0, True)
        call(graph, attention, x, x, x, dropout_p=0.0)
        return [x]

    assert simplified(build) == []


def test_numbers_made_of_constants_are_computed():
    """As the root of a head's width, once a layer; random ones are drawn, and larger tensors stay."""

    def program(x):
        width = torch.sqrt(torch.tensor(3.0) * 4)
        return x / width, x * torch.rand(()) * torch.tensor(0.5), x + torch.tensor([1.0, 2.0, 3.0]).exp()

    module = trace(program, torch.ones(3))
    targets = [str(node.target) for node in simplify(module).graph.nodes if node.op == "call_function"]
    assert not {"aten.sqrt.default"} & set(targets) and "aten.exp.default" in targets
    assert any("rand" in target for target in targets)
    torch.manual_seed(0)
    found = module(torch.ones(3))
    torch.manual_seed(0)
    torch.testing.assert_close(found, program(torch.ones(3)))
