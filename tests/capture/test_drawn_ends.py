"""Decisions by numbers that torch draws: none where all that may be drawn decide alike, and drawn all the same."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import gradsplit
from tests.capture.same_as_plain import Graphs, check_same
from tests.capture.transformers_models import VOCABULARY, text_pair


class Layers(nn.Module):
    """Layers that are left out at random, as models write it."""

    def __init__(self, way, share, count=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))
        self.leaves_out, self.share = way, share

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.leaves_out(x, self.share):
                continue
            x = layer(x)
        return x


def by_tensor(x, share):
    return torch.rand([]) < share


def by_item(x, share):
    return torch.rand(1).item() <= share - 1e-9


def by_the_opposite(x, share):
    return not (bool(1 - torch.rand(2)[1].double() > share) or False)


def by_filling(x, share):
    return torch.empty(1).uniform_(0, 1).sub_(share) < 0 and torch.rand_like(x[0, 0]) < 2


WAYS = [by_tensor, by_item, by_the_opposite, by_filling]


def check_modules(plain, compiled) -> None:
    for seed in range(6):
        found = []
        for module in (plain, compiled):
            module.zero_grad()
            torch.manual_seed(seed)
            x = torch.randn(3, 4, requires_grad=True)
            y = module(x)
            y.sum().backward()
            gradients = [parameter.grad for parameter in module.parameters()]
            found.append(([y.detach(), x.grad, *gradients], torch.get_rng_state()))
        torch.testing.assert_close(found[1][0], found[0][0])
        assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["graphs", "triton"])
def test_layers_that_are_never_left_out_are_one_graph(way, backend) -> None:
    torch.manual_seed(0)
    plain = Layers(way, 0.0).train()
    graphs = Graphs()
    compiled = gradsplit.compile(
        copy.deepcopy(plain),
        backend=graphs if backend == "graphs" else backend,
        fullgraph=True,
        options={"fallback_random": True},
    )
    check_modules(plain, compiled)
    assert graphs.count == (backend == "graphs")


@pytest.mark.parametrize("way", WAYS)
def test_layers_that_may_be_left_out_share_a_piece(way) -> None:
    torch.manual_seed(0)
    plain, graphs = Layers(way, 0.4).train(), Graphs()
    check_modules(plain, gradsplit.compile(copy.deepcopy(plain), backend=graphs))
    few = graphs.count
    graphs.count = 0
    plain = Layers(way, 0.4, count=12).train()
    check_modules(plain, gradsplit.compile(copy.deepcopy(plain), backend=graphs))
    assert graphs.count <= few


def draws_by_bounds(x, t):
    few = torch.rand([], dtype=torch.bfloat16)
    if few * 3 - 1 <= 2 and -few <= t and few.to(torch.float16) < 1:
        x = x + 1
    if torch.rand(()) < t.clone() or torch.zeros(1).uniform_(2, 3) / 2 >= 1:
        x = x * 2
    return x * (torch.rand(1).item() + 1)


def test_bounds_of_what_is_computed() -> None:
    compiled = check_same(draws_by_bounds, lambda: (torch.randn(3, requires_grad=True), torch.zeros(())))
    assert len(compiled.entries) == 1


def test_another_bound_is_another_graph() -> None:
    """A bound that lies in a tensor is guarded to be one of which nothing depends."""
    bounds = iter([0.0, 2.0, 0.5, -1.0, 0.5])
    check_same(
        draws_by_bounds, lambda: (torch.randn(3), torch.tensor(next(bounds))), fullgraph=False, calls=5
    )


def of_two(x):
    r = torch.rand(())
    return x + 1 if r - r * r > 0.2 else x


def of_a_middle(x):
    return x + 1 if torch.rand(()) == 0.0 or torch.rand(1).round().item() != 0 else x


def of_another_sign(x):
    return x + 1 if 1 / torch.empty(()).uniform_(-1, 1) > -1.5 else x


def of_no_number(x):
    return x + 1 if torch.empty(()).uniform_(-1, 1) * float("inf") <= float("inf") else x


def of_a_truth(x):
    return x + 1 if torch.empty(()).uniform_(-1, 1).bool() else x


def changed_after(x):
    r = torch.rand(())
    small = r < 1
    r.sub_(0.5)
    x = x + 1 if small else x
    return x * 2 if r < 0 else x


def changed_by_another(x):
    r, other = torch.rand(()), torch.ones(())
    other.mul_(r)
    return x + 1 if other - r < 0 or other < 0.5 else x


def turned(x):
    drawn = torch.rand(()) < 1
    drawn.view(1).logical_not_()
    return x + 1 if drawn else x


def of_whole_numbers(x):
    return x + 1 if torch.empty((), dtype=torch.float64).uniform_(0, 1e10).to(torch.int32) < 0 else x


PROGRAMS = [of_two, of_a_middle, of_another_sign, of_no_number, of_a_truth, changed_after, changed_by_another]


@pytest.mark.parametrize("program", [*PROGRAMS, turned, of_whole_numbers])
def test_what_ends_do_not_decide_is_left_to_the_draw(program) -> None:
    check_same(program, lambda: (torch.randn(3, requires_grad=True),), fullgraph=False, calls=12)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_model_that_leaves_out_layers(share) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _SIZES.items()}
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64, dropout=0.0, **sizes,
        encoder_layerdrop=share, decoder_layerdrop=share,
    )  # fmt: skip
    plain, graphs = hf.BartForConditionalGeneration(config).train(), Graphs()
    compiled = gradsplit.compile(copy.deepcopy(plain), backend=graphs)
    for seed in range(5):
        found = []
        for module in (plain, compiled):
            module.zero_grad()
            torch.manual_seed(seed)
            loss = module(**text_pair(2)).loss
            loss.backward()
            gradients = [parameter.grad for parameter in module.parameters()]
            found.append([loss.detach(), *gradients, torch.get_rng_state()])
        torch.testing.assert_close(found[1], found[0])
    assert share or graphs.count == 1


_SIZES = {"layers": 3, "attention_heads": 4, "ffn_dim": 64}
