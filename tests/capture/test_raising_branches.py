"""A branch by data that only raises is a check in the graph: where it is taken, the call runs as plain Python."""

from __future__ import annotations

import pytest
import torch

import gradsplit

layer = torch.nn.Linear(4, 4)


def asserted(x):
    y = x.exp()
    if not (y > 0).all():  # as ``assert`` does, which pytest writes anew
        raise AssertionError(f"the least is {y.min().item():.1f}")
    return y.log1p()


def asserted_by_torch(x):
    y = x.exp()
    torch._assert((y > 0).all(), "too small")
    return y.log1p()


def several(x):
    y = x.sin()
    if torch.isnan(y).any():
        raise ValueError(f"nan in {tuple(y.shape)}")
    with torch.no_grad():
        if not torch.isfinite(x).all() or (y.abs() > 3).any():
            raise OverflowError("infinite")
    return y * 2


def sampled(x):
    """Distributions look at the data of all their parameters."""
    policy = torch.distributions.Categorical(logits=layer(x))
    noise = torch.distributions.Normal(0.0, layer(x).exp())
    action = policy.sample()
    return policy.log_prob(action) + noise.log_prob(x).sum(-1) + policy.entropy()


def numbers(x):
    """Integers that are read only for a check."""
    tokens = (x.detach() * 4).long()
    if not tokens.max().item() <= x.size(1) * 2:
        raise IndexError(f"no token {tokens.max().item()}")
    if int(tokens.abs().sum()) == 0:
        raise ValueError("only nought")
    if torch.isnan(x).any().item():
        raise ValueError("nan")
    return x * tokens


def run(function, x):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    try:
        y = function(x)
    except Exception as error:
        return [type(error).__name__, str(error).partition("(")[0]], torch.rand(1)
    y.sum().backward()
    return [*y.tolist(), *x.grad.tolist()], torch.rand(1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "function", [asserted, asserted_by_torch, several, sampled, numbers], ids=lambda case: case.__name__
)
def test_what_raises_is_a_check(function, backend):
    step = gradsplit.compile(function, backend=backend, fullgraph=True)
    usual = torch.linspace(-1, 1, 8).view(2, 4)
    for x in (usual, usual * torch.nan, usual + 1, usual / 0, usual):
        assert run(step, x) == run(function, x)


def test_the_number_that_is_checked_stays_open():
    """Of a graph in which data decide a constant no region is generated."""
    numbers = []

    def keep(graph, inputs):
        numbers.extend(str(node.meta["example_value"]) for node in graph.graph.nodes if node.target == "item")
        return graph.forward

    gradsplit.compile(several, backend=keep)(torch.ones(2))
    assert len(numbers) == 3 and not any(map(str.isdigit, numbers))


def test_effects_before_the_raise_happen():
    seen, total = [], torch.zeros(())

    def step(x):
        seen.append(len(seen))
        if (x < 0).any():
            raise ValueError("negative")
        total.add_(x.detach().sum())
        return x * total

    compiled = gradsplit.compile(step, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2))
    with pytest.raises(ValueError, match="negative"):
        compiled(-torch.ones(2))
    assert seen == [0, 1] and total.item() == 2
    assert compiled(torch.ones(2)).tolist() == [4, 4]


def test_other_branches_end_the_graph():
    def handled(x):
        try:
            if (x > 0).all():
                raise ValueError
        except ValueError:
            return x * 2
        return x * 3

    def refuse_positive(x):
        if (x > 0).all():
            raise ValueError

    def handled_by_the_caller(x):
        try:
            refuse_positive(x)
        except ValueError:
            return x * 2
        return x * 3

    def changed(x, total):
        total.add_(1)
        if (x > 9).any():
            raise ValueError
        return x * total

    for function, given in (
        (handled, ()),
        (handled_by_the_caller, ()),
        (changed, (torch.zeros(1),)),
    ):
        with pytest.raises(gradsplit.Unsupported, match="data-dependent-branch"):
            gradsplit.compile(function, backend="eager", fullgraph=True)(torch.ones(2), *given)


def test_tensors_made_of_constants_are_known():
    def step(x):
        scale, count = torch.tensor(2.0), torch.tensor(0.0)
        y = x * scale.item() if scale > 1 else x
        count += x[0].detach()
        return y, bool(scale == 2)

    def read(x):
        count = torch.tensor(0.0)
        count += x[0].detach()
        return x * 2 if count > 1 else x

    assert gradsplit.compile(step, backend="eager", fullgraph=True)(torch.ones(2))[0].tolist() == [2, 2]
    compiled = gradsplit.compile(read, backend="eager")
    assert [compiled(torch.full((1,), value)).item() for value in (1.0, 2.0)] == [1.0, 4.0]
