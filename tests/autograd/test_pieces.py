"""Captured graphs cut wherever they may be: the pieces do what the whole does, whoever compiles them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gradsplit.compile_core.autograd.captured_graphs.cut_points import find_cut_points
from gradsplit.compile_core.autograd.captured_graphs.pieces import cut_graph
from gradsplit.compile_core.backends.registry import resolve_backend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.options import parse_options
from gradsplit.compile_core.pipeline import compile_pieces
from tests.capture.same_as_plain import assert_same


class Everywhere:
    """Compiles graphs cut at every allowed place that leaves no piece without a result."""

    def __init__(self, backend):
        self.backend = resolve_backend(backend)
        self.counts = []

    def __call__(self, captured, inputs):
        examples = [entry.example for entry in captured.inputs]
        points = find_cut_points(captured.module, examples)
        begins = [place for place, allowed in enumerate(points.allowed) if allowed and place]
        place_of = points.places(begins)
        pieces = cut_graph(captured.module, place_of, points.examples(place_of, examples))
        self.counts.append(len(pieces))
        options = parse_options(None, {"fallback_random": True} if self.backend.name == "triton" else None)
        changes = bool(points.changed_at)
        return compile_pieces(
            captured.module, pieces, backend=self.backend, options=options, gives_back_draws=not changes
        )


class Layers(nn.Module):
    """Norms with statistics, changes in place, views, a tied weight and autocast."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.relu_(self.norm(self.first(x)))
        with torch.autocast("cpu", torch.bfloat16):
            skipped = self.second(h)
            parts = (skipped * 2).chunk(2, dim=1)
        h = h.view(2, -1)
        late = nn.functional.linear(h.view(-1, 4), self.second.weight) + skipped.float()
        return late, parts[1] + parts[0], h


class Branches(nn.Module):
    """Modes, a checkpoint, and parameters in lists and keywords."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x):
        y = torch.addmm(input=x, mat1=x, mat2=self.weights[0])
        with torch.no_grad():
            scale = self.weights[2].abs().mean()
        y = checkpoint(lambda y: torch.tanh(y @ self.weights[1]), y, use_reentrant=False)
        stacked = torch.cat([y * scale, self.weights[2]])
        stacked[0] = 1.0
        return torch.dropout(stacked, 0.5, True), torch.rand_like(y)


class Sizes(nn.Module):
    """Numbers that pass between pieces, and sizes that are never the input's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.size(0)
        y = self.layer(x).repeat(2, 1)
        half = y.shape[0] // 4
        z = y.view(half, -1).tanh()
        return (z * rows).sum(0) + half, y.new_zeros(rows + 1, 2) + y.mean()


MODULES = (Layers, Branches, Sizes)


def observed(model, run, x):
    """Values, gradients and buffers of a training step."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    results = run(x * 1)
    sum(result.float().square().mean() for result in results if result.requires_grad).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    seen = [list(results), x.grad, gradients, list(model.buffers()), torch.rand(1)]
    model.zero_grad()
    return seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
@pytest.mark.parametrize("make", MODULES)
def test_pieces_are_the_whole(make, backend):
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    everywhere = Everywhere(backend)
    compiled = CompiledFunction(model, everywhere)
    for rows in (4, 8, 12):
        x = torch.randn(rows, 4)
        assert_same(observed(plain, plain, x), observed(model, compiled, x), f"{rows} rows")
    assert min(everywhere.counts) > 3


def points_of(function, *inputs):
    """The cut points of the graph of one call."""
    found = []

    def compile_graph(captured, inputs):
        found.append(find_cut_points(captured.module, [entry.example for entry in captured.inputs]))
        return captured.module

    CompiledFunction(function, compile_graph)(*inputs)
    return found[0]


def forbidden(points):
    return [node.name for node, allowed in zip(points.nodes, points.allowed, strict=True) if not allowed]


def test_no_cut_between_a_use_and_a_change_of_the_same_memory():
    def function(x):
        y = x + 1
        v = y.view(-1)
        z = v * 2
        y.add_(1)
        return z.exp(), v.sin()

    assert forbidden(points_of(function, torch.ones(2, 2, requires_grad=True))) == ["v", "z", "add_"]


def test_no_cut_where_grad_mode_is_another():
    def function(x):
        with torch.no_grad():
            y = x.sin()
        return y + x

    names = forbidden(points_of(function, torch.ones(2, requires_grad=True)))
    assert names == ["y", "_set_grad_enabled_1"]


def test_items_stay_with_the_operation_of_several_results():
    def function(x):
        first, second = x.chunk(2)
        y = first.sin()
        return y, second.exp()

    points = points_of(function, torch.ones(4, requires_grad=True))
    places = points.places(range(1, len(points.nodes)))
    by_name = {node.name: place for node, place in places.items()}
    assert by_name["chunk"] == by_name["first"] == by_name["second"] < by_name["y"]


def test_an_input_that_gets_a_history_takes_it_to_the_next_piece():
    def function(x, w):
        x[0] = w
        return x * 2

    compiled = CompiledFunction(function, Everywhere("aot_eager"))
    x, w = torch.zeros(2, 3), torch.ones(3, requires_grad=True)
    compiled(x, w).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))


def test_an_input_whose_shape_changes_keeps_what_uses_it_together():
    def function(x, w):
        x.t_()
        y = w * 2
        return y.sin(), x * 3

    with FakeTensorMode():
        examples = [torch.ones(2, 3), torch.ones(3, requires_grad=True)]
    points = find_cut_points(torch.fx.symbolic_trace(function), examples)
    points.examples(points.places([]), examples)
    with pytest.raises(Unsupported, match="another shape"):
        points.examples(points.places([2]), examples)


def test_draws_of_earlier_pieces_are_given_back_where_a_later_one_raises():
    def function(x, index):
        return torch.dropout(x, 0.5, True), x[index]

    def next_draw(run):
        torch.manual_seed(0)
        with pytest.raises(IndexError):
            run(x, torch.tensor([7]))
        return torch.rand(1)

    everywhere = Everywhere("aot_eager")
    compiled = CompiledFunction(function, everywhere)
    x = torch.ones(4, requires_grad=True)
    compiled(x, torch.tensor([1]))
    assert everywhere.counts == [2]
    assert torch.equal(next_draw(compiled), next_draw(function))


def test_what_no_piece_needs_any_more_is_forgotten():
    def function(x):
        return x.sin().exp().cos()

    made = []

    def compile_graph(captured, inputs):
        examples = [entry.example for entry in captured.inputs]
        points = find_cut_points(captured.module, examples)
        place_of = points.places(range(1, len(points.nodes)))
        made.extend(cut_graph(captured.module, place_of, points.examples(place_of, examples)))
        return captured.module

    CompiledFunction(function, compile_graph)(torch.ones(2, requires_grad=True))
    assert [piece.forgotten for piece in made] == [piece.inputs for piece in made]
