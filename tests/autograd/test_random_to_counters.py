"""Random operators as functions of seeds: which become so, what they give, and what is saved of them."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.random_to_counters import random_to_counters
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.counter_random import COUNTER_OPERATORS
from gradsplit.compile_core.ir.verify_graphs import verify_joint, verify_partition
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from tests.autograd.compare_with_eager import fakes, layout

aten = torch.ops.aten


def graph_of(program, inputs):
    """A graph that calls the program, in which functions without tensors among their arguments stay too."""
    try:
        results = program(*inputs)
    except RuntimeError:
        results = inputs[0]
    graph = torch.fx.Graph()
    call = graph.call_function(program, tuple(graph.placeholder(f"x{k}") for k in range(len(inputs))))
    if isinstance(results, tuple):
        graph.output(tuple(graph.call_function(operator.getitem, (call, k)) for k in range(len(results))))
    else:
        graph.output((call,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def joint_with_counters(program, *inputs):
    decompositions = random_decompositions.DECOMPOSITIONS
    joint = random_to_counters(trace_joint(graph_of(program, inputs), fakes(inputs), decompositions))
    verify_joint(joint)
    return joint


def parts_of(program, *inputs, budget=1.0):
    joint = joint_with_counters(program, *inputs)
    graph = partition(joint, budget)
    verify_partition(joint, graph)
    return graph


def counters(module):
    return [node.target for node in module.graph.nodes if node.target in COUNTER_OPERATORS]


def draws(module):
    return [node.target for node in module.graph.nodes if is_random(node)]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# Which values they have. A bound of five standard deviations of the estimate is crossed once in a million seeds.

COUNT = 40_000
HALF = torch.empty(COUNT, dtype=torch.float16)
WIDE = torch.empty(200, 200)

DISTRIBUTIONS = {
    "rand": (lambda x: torch.rand(COUNT), 1 / 2, 1 / 12),
    "rand_double": (lambda x: torch.rand(COUNT, dtype=torch.float64), 1 / 2, 1 / 12),
    "rand_like_transposed": (lambda x: torch.rand_like(x.view(200, 200).t()), 1 / 2, 1 / 12),
    "rand_like_of_another_dtype": (lambda x: torch.rand_like(x, dtype=torch.float64), 1 / 2, 1 / 12),
    "rand_half": (lambda x: torch.rand(COUNT, dtype=torch.float16), 1 / 2, 1 / 12),
    "randn": (lambda x: torch.randn(COUNT), 0, 1),
    "randn_double": (lambda x: torch.randn(COUNT, dtype=torch.float64), 0, 1),
    "randn_like": (lambda x: torch.randn_like(x), 0, 1),
    "randint": (lambda x: torch.randint(-3, 4, (COUNT,)), 0, 4),
    "randint_like": (lambda x: torch.randint_like(x, 7), 3, 4),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1, 4 / 3),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2, 9),
    "normal_of_size": (lambda x: torch.normal(2.0, 3.0, (COUNT,)), 2, 9),
    "normal_about": (lambda x: torch.normal(x * 0 + 2, 3.0), 2, 9),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(0.5), 2, 4),
    "bernoulli_of_a_tensor": (lambda x: torch.bernoulli(x * 0 + 0.25), 1 / 4, 3 / 16),
    "bernoulli_of_a_number": (lambda x: x.bernoulli(0.25), 1 / 4, 3 / 16),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(x * 0 + 0.25), 1 / 4, 3 / 16),
    "dropout": (lambda x: F.dropout(x * 0 + 1, 0.75), 1, 3),
    "native_dropout": (lambda x: torch.native_dropout(x * 0 + 1, 0.75, True)[0], 1, 3),
    "dropout1d": (lambda x: F.dropout1d(x.view(1, COUNT, 1) * 0 + 1, 0.5), 1, 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    program, mean, variance = DISTRIBUTIONS[name]
    x = torch.linspace(-1, 1, COUNT)
    graph = parts_of(program, x)
    assert counters(graph.forward) and draws(graph.forward) == [aten.randint.low]
    torch.manual_seed(0)
    (first,), (second,) = graph.forward(x), graph.forward(x)
    expected = program(x)
    for found in (first, second):
        assert (found.dtype, found.shape, layout(found)) == (expected.dtype, expected.shape, layout(expected))
        values = found.double().flatten()
        assert abs(values.mean() - mean) < 5 * math.sqrt(variance / COUNT)
        spread = ((values - mean) ** 2).var().sqrt() / math.sqrt(COUNT)
        assert abs(((values - mean) ** 2).mean() - variance) < 5 * spread + 1e-4
        if name in ("rand", "rand_double", "rand_half", "rand_like_transposed"):
            assert values.min() >= 0 and values.max() < 1
    neighbours = [(a, b) for v in (first,) for a, b in [(v.flatten()[:-1], v.flatten()[1:])]]
    for one, other in [*neighbours, (first.flatten(), second.flatten())]:
        correlation = torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_bits_are_fair_and_blocks_are_unlike_one_another():
    """The squared deviations of byte counts follow the chi-squared distribution; so do those of pairs of draws."""
    graph = parts_of(lambda x: (torch.rand(1 << 16) * 256, torch.rand(1 << 16) * 256), torch.empty(1))
    torch.manual_seed(1)
    one, other = (value.long() for value in graph.forward(torch.empty(1)))
    for values in (
        one,
        other,
        (one - other) % 256,
        (one[1:] - one[:-1]) % 256,
        (one[256:] - one[:-256]) % 256,
    ):
        expected = len(values) / 256
        statistic = ((values.bincount(minlength=256) - expected) ** 2 / expected).sum()
        assert abs(statistic - 255) < 5 * math.sqrt(2 * 255)


def test_uniform_numbers_below_one_stay_below():
    graph = parts_of(lambda x: torch.empty_like(x).uniform_(1, 2), torch.empty(4096, dtype=torch.bfloat16))
    values = graph.forward(torch.empty(4096, dtype=torch.bfloat16))[0]
    assert values.min() >= 1 and values.max() < 2 and values.unique().numel() > 100


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_events(p):
    graph = parts_of(lambda x: (x.bernoulli(p), torch.bernoulli(x * 0 + p)), torch.ones(1000))
    for found in graph.forward(torch.ones(1000)):
        assert found.eq(p).all()


def test_all_is_dropped():
    graph = parts_of(lambda x: torch.native_dropout(x, 1.0, True), torch.ones(1000))
    dropped, kept = graph.forward(torch.ones(1000))
    assert dropped.eq(0).all() and not kept.any()


def test_dropout_of_nan_and_infinity_is_nan_as_in_torch():
    x = torch.tensor([float("nan"), float("inf")]).repeat(50)
    (found,) = parts_of(lambda x: F.dropout(x, 0.5), x).forward(x)
    assert found[::2].isnan().all() and found[1::2].isnan().any() and found[1::2].isinf().any()


def test_a_seed_serves_one_operator():
    joint = joint_with_counters(lambda x: torch.rand(3) + torch.rand(3), torch.ones(3))
    second = [node for node in joint.module.graph.nodes if node.target in COUNTER_OPERATORS][1]
    for slot, rule in ((0, "serves one random operator"), (2, "no row of seeds")):
        second.args = (second.args[0], slot, *second.args[2:])
        with pytest.raises(InternalError, match=rule):
            verify_joint(joint)


# What keeps torch's kernel.


def test_operators_without_a_form_draw_in_the_programs_order():
    def program(x):
        a, b = torch.randperm(5), torch.multinomial(x.exp(), 3)
        return a, torch.rand(3), b, torch.randint(-(2**63), 2**63 - 1, (3,))

    module = joint_with_counters(program, torch.randn(4)).module
    assert draws(module) == [
        aten.randint.low,  # the seeds
        aten.randperm.default,
        aten.multinomial.default,
        aten.randint.low,
    ]
    assert len(counters(module)) == 1


def test_wrong_arguments_are_torchs_to_refuse():
    for program in (lambda x: x.bernoulli(1.5), lambda x: x.clone().uniform_(1, 0)):
        graph = parts_of(program, torch.ones(3))
        assert not counters(graph.forward)
        with pytest.raises(RuntimeError):
            graph.forward(torch.ones(3))


def test_pinned_memory_is_torchs_to_give():
    module = joint_with_counters(lambda x: x + torch.rand(3, pin_memory=True), torch.ones(3)).module
    assert draws(module) == [aten.rand.default] and not counters(module)


# Between forward and backward.


def mask_is_the_same(graph, x, *more):
    """Runs both parts: where dropout kept an element, its gradient passes."""
    results = graph.forward(x, *more)
    outputs, saved = results[: graph.num_outputs], list(results[graph.num_outputs :])
    primals = dict(zip(("input_0", "input_1", "input_2"), (x, *more), strict=False))
    kept = [primals[name] if name in primals else saved.pop(0) for name in graph.saved]
    gradients = graph.backward(*kept, torch.ones_like(outputs[0]))
    assert torch.equal(outputs[0] != 0, gradients[0] != 0)
    return len(results[graph.num_outputs :])


def test_seeds_are_saved_and_masks_are_not():
    x = leaf(64, 64)

    def program(x):
        for _ in range(3):
            x = F.dropout(x, 0.5) * 2
        return x

    graph = parts_of(program, x)
    assert graph.saved_bytes == 3 * 16
    assert len(counters(graph.backward)) == 3 and not draws(graph.backward)
    with torch.no_grad():
        assert mask_is_the_same(graph, x) == 1


def test_the_smallest_budget_keeps_the_seeds():
    x, w = leaf(8, 8), leaf(8, 8)
    graph = parts_of(lambda x, w: F.dropout(torch.relu(x @ w), 0.5) @ w.t(), x, w, budget=0.0)
    assert graph.saved_bytes == 16 and not draws(graph.backward)


def test_the_backward_draws_its_own():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.rand(5)

        @staticmethod
        def backward(ctx, gradient):
            return gradient + torch.rand(5) + torch.rand_like(gradient)

    def program(x):
        return Noisy.apply(x)

    graph = parts_of(program, leaf(5))
    assert len(draws(graph.forward)) == len(draws(graph.backward)) == 1
    assert len(counters(graph.forward)) == 1 and len(counters(graph.backward)) == 2
    assert graph.backward is not None and not graph.saved_bytes
    unread = [torch.empty(0)] * len(graph.saved)
    assert not torch.equal(
        graph.backward(*unread, torch.ones(5))[0], graph.backward(*unread, torch.ones(5))[0]
    )


def test_an_inference_graph_draws_too():
    graph = parts_of(lambda x: F.dropout(x, 0.5), torch.ones(100))
    assert graph.backward is None
    first, second = graph.forward(torch.ones(100)), graph.forward(torch.ones(100))
    assert not torch.equal(first[0], second[0])
