"""Random numbers of compiled programs: reproducible, used again by the backward, and eager's own on request."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsplit
from tests.autograd.test_random_to_counters import DISTRIBUTIONS

FALLBACK = {"fallback_random": True}


def leaf(*shape, **settings):
    return torch.randn(*shape, requires_grad=True, **settings)


def noisy(x):
    return F.dropout(torch.relu(F.dropout(x, 0.3)) + 0.1 * torch.randn_like(x), 0.5)


def test_seeds_of_torch_make_runs_reproducible():
    run, x = gradsplit.compile(noisy, fullgraph=True), torch.randn(40, 50)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    state = torch.get_rng_state()
    third = run(x)
    torch.set_rng_state(state)
    assert torch.equal(run(x), third)
    torch.manual_seed(1)
    assert torch.equal(run(x), first)
    assert torch.equal(run(x), second)
    torch.manual_seed(2)
    other = run(x)
    kept = [(value != 0).double().flatten() for value in (first, second, third, other)]
    correlations = torch.corrcoef(torch.stack(kept)) - torch.eye(4)
    assert correlations.abs().max() < 5 / 2000**0.5


def test_compiling_draws_nothing():
    x = torch.randn(4)
    torch.manual_seed(1)
    compiled = gradsplit.compile(noisy, fullgraph=True)
    first = compiled(x)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), first)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_backward_sees_the_masks_of_the_forward(budget, wrapped):
    """Each element of the result and each gradient tell which elements were kept; the two agree."""
    scale = leaf(3, 60)

    def block(x, scale):
        return F.dropout(F.dropout(torch.exp(x * scale), 0.5) + 1, 0.25)

    def program(x, scale):
        return checkpoint(block, x, scale, use_reentrant=False) if wrapped else block(x, scale)

    x = leaf(3, 60)
    options = {"activation_memory_budget": budget}
    y = gradsplit.compile(program, fullgraph=True, options=options)(x, scale)
    y.sum().backward()
    exponential = torch.exp(x * scale).detach()
    passed_both = (y - (2 * exponential + 1) / 0.75).abs() < 1e-4
    passed_outer = (y - 1 / 0.75).abs() < 1e-4
    assert (passed_both | passed_outer | (y == 0)).all()
    expected = torch.where(passed_both, 2 * exponential / 0.75, 0.0)
    torch.testing.assert_close(x.grad, expected * scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scale.grad, expected * x, rtol=1e-4, atol=1e-5)


def test_a_second_backward_sees_the_same_masks():
    x = leaf(100)
    y = gradsplit.compile(noisy, fullgraph=True)(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_call_replays_it(reentrant):
    run, x = gradsplit.compile(lambda x: F.dropout(x, 0.5), fullgraph=True), leaf(200)
    y = checkpoint(run, x, use_reentrant=reentrant)
    torch.rand(3)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)


def test_dropout_costs_one_kernel_and_no_mask(tmp_path):
    """Forward and backward are each one loop; what lies between them is the seed."""
    x = leaf(8, 16)
    options = {"trace_folder": tmp_path}
    run = gradsplit.compile(lambda x: F.dropout(torch.sin(x), 0.5) * 2, fullgraph=True, options=options)
    run(x).sum().backward()
    for part in ("forward", "backward"):
        (path,) = tmp_path.glob(f"*{part}.loops*")
        text = path.read_text()
        assert text.count("  nest ") == 1 and text.count("random_word") == 1
    (entry,) = run.entries
    assert entry.compiled.partitioned.saved_bytes == 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.second = nn.Linear(16, 16)

    def forward(self, x):
        return F.dropout1d(self.second(self.layer(x)), 0.3, self.training)


def train(model, x, steps=2):
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
    return seen


def test_less_is_saved_than_with_torchs_numbers():
    saved = {}
    for name, options in {"counters": {}, "torch": FALLBACK}.items():
        torch.manual_seed(0)
        compiled = gradsplit.compile(Encoder(), fullgraph=True, options=options)
        compiled(torch.randn(4, 8, 16))
        (entry,) = compiled._run.entries
        saved[name] = entry.compiled.partitioned.saved_bytes
    # Masks of attention, of three of the layer, and of the last, in float32.
    assert saved["torch"] - saved["counters"] > 4 * (4 * 2 * 8 * 8 + 2 * 4 * 8 * 16 + 4 * 8 * 32)


def test_a_model_trains_reproducibly_and_other_seeds_train_otherwise():
    model = gradsplit.compile(Encoder(), fullgraph=True)
    x = torch.randn(4, 8, 16)
    first, again = train(model, x), train(model, x)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[len(first) // 2])


def test_eager_on_average():
    """The mean over many runs is that of eager; the deviation of an element's mean is known from the runs."""
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(1, 2, 16)
    compiled = gradsplit.compile(copy.deepcopy(model), fullgraph=True)
    with torch.no_grad():
        plain = torch.stack([model(x) for _ in range(600)]).double()
        found = torch.stack([compiled(x) for _ in range(600)]).double()
    bound = 5 * ((plain.var(0) + found.var(0)) / 600).sqrt()
    assert ((plain.mean(0) - found.mean(0)).abs() < bound).all()


@pytest.mark.parametrize(("randomness", "masks"), [("different", 6), ("same", 1)])
def test_rows_of_vmap_draw_as_they_are_told(randomness, masks):
    def program(x):
        return torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness=randomness)(x)

    y = gradsplit.compile(program, fullgraph=True)(torch.randn(6, 50))
    assert (y != 0).unique(dim=0).shape[0] == masks


def test_layouts_are_eagers():
    x = torch.randn(4, 3, 6, 5)

    def program(x):
        like = torch.rand_like(x[::2, :, 1:])
        return F.dropout(x.permute(2, 0, 3, 1), 0.5), F.dropout(x.expand(2, *x.shape), 0.5), like

    for tensor in (x, x.to(memory_format=torch.channels_last), x[:0]):
        found = gradsplit.compile(program, fullgraph=True)(tensor)
        for one, other in zip(found, program(tensor), strict=True):
            assert one.shape == other.shape
            assert not one.numel() or one.stride() == other.stride()


# Eager's own numbers.


@pytest.mark.parametrize("backend", ["triton", "aot_eager"])
def test_fallback_is_eager_bit_for_bit(backend):
    torch.manual_seed(0)
    model, x = Encoder().double(), torch.randn(4, 8, 16, dtype=torch.float64)
    compiled = gradsplit.compile(copy.deepcopy(model), fullgraph=True, backend=backend, options=FALLBACK)
    for one, other in zip(train(model, x), train(compiled, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_fallback_gives_eagers_numbers_for_every_operator():
    def program(x):
        return tuple(function(x) for function, _, _ in DISTRIBUTIONS.values())

    x = torch.linspace(-1, 1, 40_000)
    compiled = gradsplit.compile(program, fullgraph=True, options=FALLBACK)
    torch.manual_seed(3)
    expected = program(x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    found = compiled(x)
    assert torch.equal(torch.get_rng_state(), state)
    for name, one, other in zip(DISTRIBUTIONS, expected, found, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    "network",
    [
        nn.LSTM(4, 5, 2, dropout=0.5, bidirectional=True),
        nn.GRU(4, 5, 2, bias=False, dropout=0.5, batch_first=True),
        nn.RNN(4, 5, 2, nonlinearity="relu", dropout=0.5, bidirectional=True),
    ],
    ids=["lstm", "gru", "rnn"],
)
def test_recurrent_networks_of_open_sizes_drop_out_between_layers(network):
    compiled = gradsplit.compile(network, dynamic=True, fullgraph=True, options=FALLBACK)
    for length in (2, 3):
        found, expected = [], []
        for run, results in ((compiled, found), (network, expected)):
            x = torch.randn(length, 3, 4, generator=torch.Generator().manual_seed(length)).requires_grad_()
            torch.manual_seed(length)
            result, states = run(x)
            network.zero_grad()
            result.square().sum().backward()
            gradients = [parameter.grad for parameter in network.parameters()]
            results += [result, states, x.grad, gradients, torch.get_rng_state()]
        torch.testing.assert_close(found, expected)


def test_the_default_of_aot_eager_is_torchs_kernels():
    x = torch.randn(30)
    run = gradsplit.compile(noisy, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    expected = noisy(x)
    torch.manual_seed(0)
    assert torch.equal(run(x), expected)


# A graph that raises.


@pytest.mark.parametrize("options", [{}, FALLBACK])
@pytest.mark.parametrize("gradients", [False, True])
def test_numbers_of_a_failed_graph_are_not_drawn_twice(options, gradients):
    def program(x, table, index):
        return F.dropout(x, 0.5).sum() + F.embedding(index, table) * torch.rand(3)

    x, table = torch.randn(20, requires_grad=gradients), torch.randn(4, 3)
    compiled = gradsplit.compile(program, fullgraph=True, options=options)
    compiled(x, table, torch.tensor([1]))
    states = []
    for run in (program, compiled):
        torch.manual_seed(5)
        with pytest.raises(IndexError):
            run(x, table, torch.tensor([9]))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_imports_and_a_first_compilation_leave_all_random_states_alone(tmp_path: Path) -> None:
    script = """
import random, numpy, torch
def states():
    names, keys, *rest = numpy.random.get_state()
    return random.getstate(), (keys.tolist(), rest), torch.get_rng_state().tolist()
before = states()
import gradsplit.bucketing, gradsplit.compile_core, gradsplit.distributed, gradsplit.launch
assert states() == before, "imports"
f = gradsplit.compile(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))
before = states()
f(torch.ones(2, 3)).sum().backward()
assert states() == before, "a compilation"
str(gradsplit.explain(torch.sin)(torch.ones(2)))
assert states() == before, "an explanation"
"""
    environment = {**os.environ, "GRADSPLIT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
