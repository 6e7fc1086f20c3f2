"""Less memory between forward and backward for more time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core.autograd.partitioning.partition import partition
from tests.autograd.compare_with_eager import joint_graph

DIM = 16


def block(x, first, second, third, fourth):
    x = x + F.gelu(F.layer_norm(x, (DIM,)) @ first) @ second
    return x + F.gelu(F.layer_norm(x, (DIM,)) @ third) @ fourth


def inputs() -> list[torch.Tensor]:
    sizes = [(8, DIM), (DIM, 4 * DIM), (4 * DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)]
    return [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]


def products(module: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes)


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
def test_budget_is_kept_and_gradients_stay(budget):
    values = inputs()
    joint = joint_graph(block, *values)
    most = partition(joint).saved_bytes
    graph = partition(joint, budget)
    assert graph.saved_bytes <= budget * most
    results = graph.forward(*values)
    saved = dict(zip([name for name in graph.saved if name not in joint.primals],
                     results[graph.num_outputs:], strict=True))  # fmt: skip
    saved |= dict(zip(joint.primals, values, strict=True))
    tangent = torch.randn(8, DIM, dtype=torch.float64)
    with torch.no_grad():
        found = graph.backward(*(saved[name] for name in graph.saved), tangent)
    expected = torch.autograd.grad(block(*values), values, tangent)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_smaller_budgets_cost_more_products():
    joint = joint_graph(block, *inputs())
    counts = [products(partition(joint, budget).backward) for budget in (1.0, 0.5, 0.0)]
    assert counts == sorted(counts)
    assert counts[0] == 8
    # Without anything saved the backward computes the forward again, but for the last product, which no gradient reads.
    assert counts[-1] == 8 + 3


def test_random_numbers_are_never_drawn_again():
    values = inputs()
    joint = joint_graph(lambda x, w: F.dropout(x @ w, 0.5) @ w.t(), values[0], values[1])
    graph = partition(joint, 0.0)
    assert "aten.bernoulli.p" in {str(node.target) for node in graph.forward.graph.nodes}
    assert "aten.bernoulli.p" not in {str(node.target) for node in graph.backward.graph.nodes}


def test_what_is_computed_again_waits_until_it_is_read():
    """Computed all at the backward's start, it would lie in memory together, as if it had been saved."""
    joint = joint_graph(block, *inputs())
    graph = partition(joint, 0.0)
    from_tangents: set[torch.fx.Node] = set()
    kinds = []
    for node in graph.backward.graph.nodes:
        if node.name in joint.tangents or from_tangents.intersection(node.all_input_nodes):
            from_tangents.add(node)
        if node.op == "call_function":
            kinds.append(node in from_tangents)
    first_gradient = kinds.index(True)
    assert kinds[first_gradient:].count(False) >= 4
