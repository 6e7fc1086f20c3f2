"""What is saved for the backward, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable

import networkx
import pytest
import torch
import torch.nn.functional as F

import gradsplit
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.random_to_counters import random_to_counters
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from tests.autograd.compare_with_eager import captured, fakes, partitioned_graph
from tests.lowering.move_graph import on_gpu


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def saved_targets(graph: PartitionedGraph) -> list[str]:
    """The operators whose values are saved; inputs left out."""
    saved = graph_results(graph.forward)[graph.num_outputs :]
    return sorted(str(node.target) for node in saved if node is not None)


def backward_targets(graph: PartitionedGraph) -> set[str]:
    assert graph.backward is not None
    return {str(node.target) for node in graph.backward.graph.nodes if node.op == "call_function"}


def test_pointwise_values_are_computed_again():
    graph = partitioned_graph(lambda x: x.sin().exp().tanh() + 1, leaf(8))
    assert saved_targets(graph) == []
    assert graph.saved == (graph_inputs(graph.forward)[0].name,)
    assert graph.saved_bytes == 0


def test_products_are_saved():
    graph = partitioned_graph(lambda x, w: (x @ w).sin().exp() + 1, leaf(8, 8), leaf(8, 8))
    assert saved_targets(graph) == ["aten.mm.default"]
    assert graph.saved_bytes == 8 * 8 * 4
    assert "aten.sin.default" in backward_targets(graph)


def test_a_result_that_plain_pytorch_saves_is_saved():
    """Its backward reads the result as it is by then. What it computes from that is not saved in its stead."""
    graph = partitioned_graph(lambda x, y: x**y, leaf(8), leaf(8))
    assert saved_targets(graph) == ["aten.pow.Tensor_Tensor"]


def test_a_narrow_value_is_saved_rather_than_its_wide_source():
    graph = partitioned_graph(lambda x, w: (x @ w).sum(1).exp(), torch.randn(8, 8), leaf(8, 64))
    assert graph.saved_bytes == 8 * 4


def test_random_values_are_saved_and_drawn_in_the_forward():
    graph = partitioned_graph(lambda x: F.dropout(x, 0.5), leaf(8))
    assert saved_targets(graph) == ["aten.bernoulli.p"]
    assert "aten.bernoulli.p" not in backward_targets(graph)


def test_results_of_operators_with_several_are_saved_one_by_one():
    graph = partitioned_graph(lambda x: x.max(1).values.exp(), leaf(4, 6))
    assert graph.saved_bytes <= 4 * 8 + 4 * 4
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in graph_inputs(graph.backward))


def test_an_operator_with_several_results_before_a_product() -> None:
    graph = partitioned_graph(lambda x: x.frexp()[0] @ x.frexp()[0].mT, leaf(8, 8))
    assert graph.backward is not None


def test_a_value_whose_name_no_placeholder_may_have() -> None:
    graph = partitioned_graph(lambda x, i: (x * (i << 1), i << 1), leaf(2), torch.arange(2))
    assert len(graph.saved) == 1


def test_product_for_a_product_is_not_written_again():
    """``relu`` feeds the second product's backward from memory, so it is saved, not computed again."""
    graph = partitioned_graph(lambda x, w, v: (x @ w).relu() @ v, torch.randn(8, 8), leaf(8, 8), leaf(8, 8))
    assert "aten.relu.default" in saved_targets(graph)
    assert graph.saved_bytes == 8 * 8 * 4


@pytest.mark.parametrize(
    ("activation", "rows", "device", "is_saved"),
    [
        # A kernel of the backward reads the product anyway, and can write what it activates besides.
        (lambda x: F.gelu(x), 2048, "cuda", False),
        (lambda x: F.dropout(F.silu(x) * x.sin()), 2048, "cuda", False),
        (lambda x: F.gelu(x), 16, "cuda", True),
        (lambda x: F.gelu(x), 2048, "cpu", True),
        # The backward needs the result alone; the norm's rows are read by a kernel that must come later.
        (lambda x: x.relu(), 2048, "cuda", True),
        (lambda x: F.layer_norm(x, (1024,)), 2048, "cuda", True),
    ],
)
def test_a_large_activation_is_written_again_beside_its_gradient(
    activation: Callable[[torch.Tensor], torch.Tensor], rows: int, device: str, is_saved: bool
) -> None:
    """For the gradient of the second product's weight, where that costs no reading."""
    module = captured(lambda x, w, v: (activation(x @ w) @ v).sum())
    inputs = fakes([torch.randn(rows, 8), leaf(8, 1024), leaf(1024, 8)])
    decompositions = {**decomposition_table("cpu"), **random_decompositions.DECOMPOSITIONS}
    joint = random_to_counters(trace_joint(module, inputs, decompositions))
    if device == "cuda":
        on_gpu(joint.module)
    graph = partition(joint)
    assert graph.backward is not None
    products = graph.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    read = {source for product in products for source in (product.args[0], *product.args[0].all_input_nodes)}
    assert (
        any(node.op == "placeholder" and node.meta["val"].numel() == rows * 1024 for node in read) == is_saved
    )


def test_value_in_memory_is_preferred_to_one_that_would_be_written_to_be_saved():
    """The derivative of gelu has the size of its argument; but the argument, a product, is written anyway."""

    def program(x, w):
        product = x @ w
        return product * product.erf() * product.sin()

    assert saved_targets(partitioned_graph(program, torch.randn(8, 8), leaf(8, 8))) == ["aten.mm.default"]


def test_changed_input_is_copied_if_it_is_saved():
    def program(x, w):
        y = w * x.sin()
        x.add_(1)
        return y

    graph = partitioned_graph(program, torch.randn(8), leaf(8))
    assert graph.saved_bytes == 8 * 4
    assert saved_targets(graph) in (["aten.clone.default"], ["aten.sin.default"])


def test_a_copy_is_read_as_it_lies():
    """It has no gaps, which the changed input has."""

    def program(x, w):
        y = torch.view_as_complex(torch.stack([x, w], -1)).abs()
        x.t().add_(1)
        with torch.no_grad():
            return torch.mul(w, 3, out=y)

    def gradient(run):
        x, w = torch.arange(1.0, 9.0).view(2, 4)[:, ::2], torch.ones(2, 2, requires_grad=True)
        run(x, w).backward(torch.arange(4.0).view(2, 2))
        return w.grad

    torch.testing.assert_close(gradient(gradsplit.compile(program)), gradient(program))


def test_a_cut_of_unequal_capacities_is_found():
    """What rounding left of a capacity once looked like a way past the cut."""

    def program(x, w):
        angle = torch.complex(x, x).angle().nan_to_num_()
        return F.pairwise_distance(w, x / angle)

    graph = partitioned_graph(program, torch.randn(1, dtype=torch.float64), leaf(1, 3).double())
    assert graph.saved


def test_inputs_and_results_of_the_parts():
    graph = partitioned_graph(lambda x, w: (x @ w).exp(), leaf(2, 2), leaf(2, 2))
    assert graph.backward is not None
    assert len(graph_results(graph.forward)) == graph.num_outputs + len(saved_targets(graph))
    assert [node.name for node in graph_inputs(graph.backward)][: len(graph.saved)] == list(graph.saved)
    assert len(graph_inputs(graph.backward)) == len(graph.saved) + len(graph.signature.tangents)
    assert len(graph_results(graph.backward)) == len(graph.signature.gradient_inputs)


def test_undefined_gradient():
    graph = partitioned_graph(lambda x, unused: x * 2, leaf(3), leaf(3))
    assert graph.backward is not None
    assert graph_results(graph.backward)[1] is None


def test_inference_graph_has_no_backward():
    graph = partitioned_graph(lambda x: x * 2, torch.randn(3))
    assert graph.backward is None and graph.saved == ()


def test_transformer_block_saves_few_bytes():
    """One block saves what a written-by-hand one would: the inputs of products, attention's own,
    statistics."""
    tokens, width, heads = 16, 32, 4

    def separate_heads(x, start):
        return x[..., start : start + width].reshape(1, tokens, heads, width // heads).transpose(1, 2)

    def block(x, g1, b1, wqkv, wo, g2, b2, w1, w2):
        qkv = F.linear(F.layer_norm(x, (width,), g1, b1), wqkv)
        q, k, v = (separate_heads(qkv, part * width) for part in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, tokens, width)
        x = x + F.linear(y, wo)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,), g2, b2), w1)), w2)

    norm, attention, mlp = (
        [(width,)] * 2,
        [(3 * width, width), (width, width)],
        [(4 * width, width), (width, 4 * width)],
    )
    weights = [leaf(*shape) for shape in (*norm, *attention, *norm, *mlp)]
    graph = partitioned_graph(block, torch.randn(1, tokens, width), *weights)
    one = tokens * width * 4
    # Two normalised inputs, q k v, attention's result, the residual sum, gelu's argument and result; and
    # statistics.
    assert graph.saved_bytes <= (2 + 3 + 1 + 1 + 4 + 4) * one + one // 2


def test_sums_of_branches_are_saved_rather_than_narrow_branches() -> None:
    """The backward would have to add the branches up again, for a few bytes less."""

    def residuals(x, first, second, third):
        for weight in (first, second, third):
            normal = torch.nn.functional.layer_norm(x, (32,))
            x = x + (normal.bfloat16() @ weight.bfloat16())
        return torch.nn.functional.layer_norm(x, (32,)).sum()

    inputs = [leaf(64, 32), *(leaf(32, 32) for _ in range(3))]
    joint = trace_joint(captured(residuals), fakes(inputs), decomposition_table("cuda"))
    graph = partition(joint)
    assert graph.backward is not None
    saved = [node.meta["val"] for node in graph.backward.graph.nodes if node.name in graph.saved]
    # But for the products' inputs and weights, and one row of statistics each.
    narrow = [value for value in saved if value.dtype == torch.bfloat16 and value.shape == (64, 32)]
    wide = [value for value in saved if value.dtype == torch.float32 and value.shape == (64, 32)]
    assert len(wide) == 4 and len(narrow) <= 3, "the input and three sums, the products' inputs"


def test_a_batch_norm_saves_its_narrow_input() -> None:
    """Not the copy in float32 that its statistics and its result are computed from."""

    def normalised(x, weight):
        y = torch.nn.functional.conv2d(x, weight)
        return torch.nn.functional.conv2d(
            torch.nn.functional.batch_norm(y, None, None, training=True), weight
        )

    inputs = [
        leaf(4, 8, 6, 6).detach().bfloat16().requires_grad_(),
        leaf(8, 8, 1, 1).detach().bfloat16().requires_grad_(),
    ]
    graph = partition(trace_joint(captured(normalised), fakes(inputs), decomposition_table("cuda")))
    assert graph.backward is not None
    saved = [node.meta["val"] for node in graph.backward.graph.nodes if node.name in graph.saved]
    assert not [
        value for value in saved if value.dtype == torch.float32 and value.dim() == 4 and value.numel() > 8
    ]


def test_the_cut_in_parts_is_that_of_the_whole_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for width in (8, 4, 2):
            y = (x @ weight).exp()
            x = x + F.layer_norm(y.sin() * y[:, :1], (8,)).tanh() + y[:, :width].sum(1, keepdim=True).exp()
        return x

    def saved() -> tuple[str, ...]:
        return partitioned_graph(layers, leaf(4, 8), leaf(8, 8)).saved

    in_parts, find = saved(), networkx.weakly_connected_components
    counts = []

    def as_one(network: networkx.DiGraph) -> list[set[object]]:
        counts.append(sum(1 for _ in find(network)))
        return [set(network)]

    monkeypatch.setattr(networkx, "weakly_connected_components", as_one)
    assert saved() == in_parts
    assert counts[0] > 3
