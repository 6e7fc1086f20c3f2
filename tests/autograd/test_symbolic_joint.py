"""One trace and one partition serve all sizes of a graph: results, changes of inputs and gradients are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradsplit
from gradsplit.compile_core.observe.stage_times import Stopwatch
from tests.autograd.compare_with_eager import assert_same, backward, copies


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.joint = nn.Linear(8, 24)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, time = tokens.shape
        x = self.table(tokens)
        parts = [
            part.view(batch, time, 2, 4).transpose(1, 2) for part in self.joint(self.norm(x)).split(8, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        logits = self.out(x + mixed.transpose(1, 2).reshape(batch, time, 8))
        return F.cross_entropy(logits.view(-1, 11), tokens.roll(-1, 1).view(-1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(2),
    )


def changed(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = x.shape[0]
    x[: rows // 2].mul_(2)
    y.add_(x.detach().sum() / rows)
    return x.t() * y, x.view(-1)


def views(x: torch.Tensor, y: torch.Tensor) -> Any:
    flat = x.reshape(-1)
    total = x.sin() + y
    return flat[: flat.shape[0] // 3], total, total[1:], x.expand(2, *x.shape), y.unsqueeze(0)


def sizes_as_numbers(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows, columns = x.shape
    scaled = x / rows + torch.arange(columns) * rows**0.5
    return torch.cat([scaled, y]).cumsum(0), torch.full((rows + columns,), rows * 0.5), scaled.mean(0)


def saved_sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.pad(x, (1, 2)).softmax(0), x.repeat(2, 3).sum(), (y @ x.t()).max(1).values, x.std()


def chosen(x: torch.Tensor, y: torch.Tensor) -> Any:
    index = torch.arange(x.shape[0]) // 2
    return x[index], y.index_add(0, index, x), torch.where(x > 0, x, y.mean())


def pair(rows: int) -> Sequence[torch.Tensor]:
    return [
        torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) * 1,
        torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) * 1,
    ]


def leaves(rows: int) -> Sequence[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in pair(rows)]


FUNCTIONS = [views, sizes_as_numbers, saved_sizes, chosen]
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Sequence[torch.Tensor]]]] = {
    "attention": (Attention, lambda rows: [torch.randint(0, 11, (rows, rows + 2))]),
    "convolutions": (convolutions, lambda rows: [torch.randn(rows, 2, 8, rows + 4)]),
}
# The first has no size that is 1, which would be static, nor two that are equal by chance.
ROWS = (4, 7, 6, 12, 5)


def stages(watch: Stopwatch) -> tuple[int, int]:
    """How many graphs were traced and partitioned."""
    seconds = watch.seconds()
    return len(seconds.get("trace_joint", [])), len(seconds.get("partition", []))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: Callable[..., Any]) -> None:
    watch = Stopwatch()
    compiled = gradsplit.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in ROWS:
        inputs = leaves(rows)
        ours = copies(inputs)
        expected, found = function(*inputs), compiled(*ours)
        for results in (expected, found):
            backward([result.clone() for result in results])
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        for one, other in zip(ours, inputs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert stages(watch) == (1, 1)


def test_inputs_that_are_changed() -> None:
    watch = Stopwatch()
    compiled = gradsplit.compile(changed, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in ROWS:
        x, y = leaves(rows)
        outcomes = []
        for run in (changed, compiled):
            values = [x * 1, y.detach()[:, :rows].clone().t().contiguous()]
            results = run(*values)
            gradient = torch.autograd.grad(results[0].sum() + values[0].cos().sum(), x)[0]
            outcomes.append([*results, *values, gradient])
            assert results[1].untyped_storage().data_ptr() == values[0].untyped_storage().data_ptr()
        for one, other in zip(*outcomes, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert stages(watch) == (1, 1)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    make, draw = MODULES[name]
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    watch = Stopwatch()
    compiled = gradsplit.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in ROWS:
        inputs = [x.double() if x.is_floating_point() else x for x in draw(rows)]
        for module in (plain, compiled):
            module.zero_grad()
            module(*inputs).square().sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # Before torch 2.13 the shape of a pooled image depended on whether a side is odd.
    most = 2 if name == "convolutions" and torch.__version__ < (2, 13) else 1
    assert stages(watch) <= (most, most)


def test_what_the_trace_asks_is_guarded() -> None:
    def columns_must_fit(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.view(x.shape[0] // 2, -1) @ w).relu()

    watch = Stopwatch()
    compiled = gradsplit.compile(columns_must_fit, backend="aot_eager", dynamic=True)
    for rows in (4, 8, 6):
        x = torch.randn(rows, 3, requires_grad=True)
        w = torch.randn(6, 2, requires_grad=True)
        torch.testing.assert_close(compiled(x, w), columns_must_fit(x, w))
        with pytest.raises(RuntimeError):
            compiled(x, torch.randn(5, 2))
    assert stages(watch)[0] == 1


def test_sizes_are_saved_as_integers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mean(0).sin()

    compiled = gradsplit.compile(function, backend="aot_eager", dynamic=True)
    x = torch.randn(5, 3, requires_grad=True)
    compiled(x).sum().backward()
    (entry,) = compiled.entries
    graph = entry.compiled.partitioned
    inputs = {node.name: node.meta["val"] for node in graph.backward.graph.find_nodes(op="placeholder")}
    kinds = [type(inputs[name]) for name in graph.saved]
    assert torch.SymInt in kinds and kinds == sorted(kinds, key=lambda kind: kind is torch.SymInt)
    # The input itself is not saved for its sizes.
    primals = {node.name for node in graph.forward.graph.find_nodes(op="placeholder")}
    assert not primals & set(graph.saved)


def branches(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = x.shape[0]
    chosen = torch.cond(
        x.sum() > 0,
        lambda a, b: (a.t() @ b / a.shape[0], a[1:] * 3),
        lambda a, b: (b.t() @ a, a[1:] * 2),
        (x, y),
    )
    return (*chosen, chosen[1].sum(0) * rows)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
def test_branches_that_data_decide(backend: str) -> None:
    watch = Stopwatch()
    compiled = gradsplit.compile(branches, backend=backend, dynamic=True, fullgraph=True)
    for rows in ROWS[:3] if backend == "aot_eager" else ROWS[:2]:
        for sign in (1, -1):
            inputs = [(tensor.detach().abs() * sign).requires_grad_() for tensor in leaves(rows)]
            ours = copies(inputs)
            for run, given in ((branches, inputs), (compiled, ours)):
                backward(run(*given))
            for one, other in zip(ours, inputs, strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert stages(watch)[1] == 1
    assert hasattr(compiled.entries[0].compiled, "partitioned")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
        (nn.GRU, {"num_layers": 2}),
        (nn.RNN, {"bias": False}),
    ],
    ids=["lstm", "lstm_projected", "gru", "rnn"],
)
def test_last_states_of_recurrent_networks_have_the_shapes_of_the_first(kind: Any, settings: Any) -> None:
    network = kind(4, 5, **settings).double()

    def function(x: torch.Tensor) -> Any:
        states = network(x)[1]
        return [state * state.dim() for state in (states if isinstance(states, tuple) else (states,))]

    watch = Stopwatch()
    compiled = gradsplit.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (3, 4):
        x = torch.randn(2, rows, 4, dtype=torch.float64, requires_grad=True)
        found, expected = compiled(x), function(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        wanted = [x, *network.parameters()]
        gradients = [
            torch.autograd.grad(sum(s.square().sum() for s in some), wanted) for some in (found, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert stages(watch)[0] == 1
