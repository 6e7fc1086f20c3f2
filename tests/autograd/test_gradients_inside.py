"""``torch.autograd.grad`` and ``backward`` inside a compiled function: part of its graph, or else a graph break, the
pieces round it compiled.

Where the gradients are to be differentiated behind a break, what comes before is compiled for that, unasked.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad

import gradsplit
from gradsplit.compile_core.capture.torch_rules import gradient_calls
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, leaf


def gradient_of_an_input(compile):
    def program(x, w):
        y = (x * w).sin()
        (g,) = grad(y.sum(), x)
        return g * 2

    f, x, w = compile(program), leaf(3), leaf(3)
    return [f(x, w) for _ in range(2)]


def gradient_of_a_new_leaf(compile):
    def program(x, w):
        x = x.detach().requires_grad_()
        y = (x * w).sin().sum()
        (g,) = grad(y, x)
        return g * 2

    f, x, w = compile(program), leaf(3), leaf(3)
    return [f(x, w) for _ in range(2)]


def backward_of_the_loss(compile):
    def program(x, w):
        y = (x * w).sin()
        y.sum().backward()
        return x.grad * 2

    f, x, w = compile(program), leaf(3), leaf(3)
    return [(f(x, w), w.grad.clone()) for _ in range(2)]


def inner_optimization(compile):
    def program(x, w):
        for _ in range(3):
            loss = (x * w).sin().square().sum()
            (g,) = grad(loss, x)
            x = (x - 0.1 * g).detach().requires_grad_()
        return x

    f, x, w = compile(program), leaf(3), torch.randn(3)
    return f(x, w), f(x + 1, w)


def penalty(compile):
    def program(x, w):
        y = (x * w).sin().sum()
        (g,) = grad(y, x, create_graph=True)
        return y + g.square().sum()

    f, x, w = compile(program), leaf(3), leaf(3)
    losses = [f(x, w) for _ in range(2)]
    torch.stack(losses).sum().backward()
    return losses, x.grad, w.grad


def step_of_a_critic(compile):
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)

    def step(real, fake, share):
        optimizer.zero_grad()
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = critic(between)
        (g,) = grad(scores, between, torch.ones_like(scores), create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (g.norm(2, dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    f = compile(step)
    losses = [f(torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 1)) for _ in range(3)]
    return losses, list(critic.parameters())


def forces_from_an_energy(compile):
    network = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def program(positions):
        energy = network(positions).sum()
        (slope,) = grad(energy, positions, create_graph=True)
        return energy, -slope

    f, positions = compile(program), leaf(5, 3)
    energy, forces = f(positions)
    (energy.square() + (forces - 1).square().sum()).backward()
    return energy, forces, [parameter.grad for parameter in network.parameters()], positions.grad


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        gradient_of_an_input,
        gradient_of_a_new_leaf,
        backward_of_the_loss,
        inner_optimization,
        penalty,
        step_of_a_critic,
        forces_from_an_energy,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_gradients_inside(scenario, backend):
    # The second call of the inner optimization begins with a tensor that has a history.
    check_scenario(scenario, backend, breaks=scenario is inner_optimization)


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_gradients_behind_breaks(scenario, backend, monkeypatch):
    """As where something keeps a backward out of the graph."""
    monkeypatch.setattr(gradient_calls, "backwards_are_watched", lambda: True)
    check_scenario(scenario, backend, breaks=True)


@pytest.mark.parametrize("breaks", [False, True])
def test_the_pieces_are_graphs(breaks, monkeypatch):
    monkeypatch.setattr(gradient_calls, "backwards_are_watched", lambda: breaks)
    graphs = []

    def backend(graph, examples):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_method"])
        return graph

    def program(x, w):
        y = (x * w).sin().sum()
        (g,) = grad(y, x, create_graph=True)
        return y + g.square().sum()

    compiled = gradsplit.compile(program, backend=backend)
    compiled(leaf(3), leaf(3)).backward()
    first, second = ["sin", "sum"], ["square", "sum"]
    assert graphs == ([first, second] if breaks else [first + second])
