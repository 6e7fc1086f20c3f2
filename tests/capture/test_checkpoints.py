"""``torch.utils.checkpoint`` in captured code: one graph, and what is not to be kept is not kept."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import gradsplit
from tests.capture.same_as_plain import check_same

BACKENDS = ["eager", "aot_eager", "triton"]


class Block(nn.Module):
    def __init__(self, reentrant: bool, probability: float = 0.5):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.reentrant = reentrant
        self.probability = probability

    def part(self, x):
        return F.dropout(self.down(torch.relu(self.up(x))), self.probability) + x

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_with_dropout(reentrant, backend):
    torch.manual_seed(0)
    model = nn.Sequential(Block(reentrant), Block(reentrant))
    options = {"fallback_random": True}
    compiled = gradsplit.compile(model, backend=backend, fullgraph=True, options=options)
    gradients = []
    for run in (model, compiled):
        for seed in range(2):
            torch.manual_seed(seed)
            x = leaf(4, 8)
            model.zero_grad()
            run(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*gradients)


def bytes_packed(function, *arguments):
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*arguments)
    return sum(sizes)


def test_the_eager_backend_keeps_no_more_than_plain_torch():
    model = Block(False)
    compiled = gradsplit.compile(model, backend="eager", fullgraph=True)
    x = leaf(4, 8)
    compiled(x)
    assert bytes_packed(compiled, x) == bytes_packed(model, x)
    assert bytes_packed(model.part, x) > bytes_packed(compiled, x)


def saved_bytes(function):
    compiled = gradsplit.compile(lambda x: function(x), backend="aot_eager", fullgraph=True)
    compiled(leaf(4, 8))
    return compiled.entries[0].compiled.partitioned.saved_bytes


def test_the_partition_saves_nothing_inside_a_checkpoint():
    model = Block(False, probability=0.0)
    assert saved_bytes(model) == 0
    assert saved_bytes(model.part) > 0


def test_the_boundary_between_two_checkpoints_is_saved():
    assert saved_bytes(nn.Sequential(Block(False, 0.0), Block(False, 0.0))) == 4 * 8 * 4


def nested(x):
    def inner(y):
        return y.sin().exp()

    def outer(y):
        return checkpoint(inner, y * 2, use_reentrant=False).tanh()

    return checkpoint(outer, x, use_reentrant=False)


def structured(x):
    def body(pair, scale=1.0):
        return {"sum": pair[0] + pair[1], "rest": (pair[0] * scale, 3, None)}

    made = checkpoint(body, (x, x * 2), use_reentrant=False, scale=2.0)
    return made["sum"], made["rest"]


def under_no_grad(x):
    with torch.no_grad():
        return checkpoint(torch.sin, x, use_reentrant=False)


def passes_its_argument_on(x):
    y = x * 2
    z = checkpoint(lambda t: (t, t.sin()), y, use_reentrant=False)
    return z[0] + z[1]


def no_argument_needs_gradients(x):
    scale = x * 2
    return checkpoint(lambda t: t * scale, torch.ones(3), use_reentrant=True) + x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "program",
    [nested, structured, under_no_grad, passes_its_argument_on, no_argument_needs_gradients],
    ids=lambda program: program.__name__,
)
def test_same_as_plain(program, backend):
    check_same(program, lambda: (leaf(3),), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_inside(backend):
    """Its statistics change at the forward and again at the recomputation, as in plain torch."""
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)

        def program(x, norm=norm):
            return checkpoint(norm, x, use_reentrant=False)

        run = gradsplit.compile(program, backend=backend, fullgraph=True) if compiled else program
        for _ in range(2):
            run(leaf(8, 4)).square().sum().backward()
        states.append({name: value.clone() for name, value in norm.state_dict().items()})
    torch.testing.assert_close(*states)


def save_products(context, operator, *args, **kwargs):
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_that_saves_products(backend):
    model = Block(False)
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    def program(x):
        return checkpoint(model.part, x, use_reentrant=False, context_fn=contexts)

    check_same(program, lambda: (leaf(4, 8),), backend=backend)


def test_side_effects_end_the_graph():
    calls = []

    def body(x):
        calls.append(1)
        return x.sin()

    check_same(
        lambda x: checkpoint(body, x, use_reentrant=False) * 2, lambda: (leaf(3),), fullgraph=False, calls=2
    )
    assert len(calls) == 2 * 2 * 2  # two programs, two calls, forward and recomputation


def test_checkpoint_sequential():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    check_same(
        lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False),
        lambda: (leaf(2, 4),),
        fullgraph=True,
    )
