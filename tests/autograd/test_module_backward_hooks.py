"""Modules with hooks of the backward: the hooks are plain Python, what lies between them is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, leaf


class Scaled(nn.Module):
    """A forward of the user's, with a default argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, shift=None, *, factor=1.0):
        y = self.linear(x) * factor
        return y if shift is None else y + shift


def model():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Scaled())


def note(log):
    def hook(module, made, arrived):
        log.append((type(module).__name__, [None if g is None else g.clone() for g in (*made, *arrived)]))

    return hook


def on_the_root(compile):
    module, log, x = model(), [], leaf(2, 3)
    f = compile(module)
    module.register_full_backward_hook(note(log))
    module.register_full_backward_pre_hook(lambda module, arrived: (arrived[0] * 2,))
    for _ in range(2):
        f(x).sum().backward()
    return log, x.grad, [parameter.grad for parameter in module.parameters()]


def on_children(compile):
    module, log, x = model(), [], leaf(2, 3)
    f = compile(module)
    for child in module.modules():
        child.register_full_backward_hook(note(log))
    module[1].register_full_backward_hook(lambda module, made, arrived: (made[0] * 3,))
    for _ in range(2):
        f(x).sum().backward()
    return log, x.grad, [parameter.grad for parameter in module.parameters()]


def registered_and_removed(compile):
    module, log, x = model(), [], leaf(2, 3)
    f = compile(module)
    f(x).sum().backward()
    handles = [child.register_full_backward_hook(note(log)) for child in (module, module[2])]
    f(x).sum().backward()
    for handle in handles:
        handle.remove()
    f(x).sum().backward()
    return log, x.grad


def of_all_modules(compile):
    module, log, x = model(), [], leaf(2, 3)
    f = compile(module)
    f(x)
    handle = nn.modules.module.register_module_full_backward_hook(note(log))
    try:
        f(x).sum().backward()
    finally:
        handle.remove()
    f(x).sum().backward()
    return log, x.grad


def arguments_as_the_caller_wrote_them(compile):
    module, log, x = Scaled(), [], leaf(2, 3)
    f = compile(module)
    module.register_forward_pre_hook(
        lambda m, args, kwargs: log.append((args, dict(kwargs))), with_kwargs=True
    )
    module.register_full_backward_hook(note(log))
    results = [f(x), f(x, torch.ones(3)), f(x, shift=torch.ones(3)), f(x, factor=2.0)]
    torch.stack(results).sum().backward()
    return results, log, x.grad


def several_arguments(compile):
    class Product(nn.Module):
        def forward(self, x, w):
            return x * w, x + w

    module, log, x, w = Product(), [], leaf(3), torch.randn(3)
    f = compile(module)
    module.register_full_backward_hook(note(log))
    product, _ = f(x, w)
    product.sum().backward()
    return log, x.grad


def around_compiled_children(compile):
    module, log, x = model(), [], leaf(2, 3)
    module[0], module[2] = compile(module[0]), compile(module[2])
    module[0].register_full_backward_hook(note(log))
    module.register_full_backward_hook(note(log))
    module(x).sum().backward()
    return log, x.grad


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        on_the_root,
        on_children,
        registered_and_removed,
        of_all_modules,
        arguments_as_the_caller_wrote_them,
        several_arguments,
        around_compiled_children,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_modules_with_hooks(scenario, backend):
    check_scenario(scenario, backend, breaks=True)


def test_the_forward_of_a_hooked_module_is_one_graph():
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    module = model()
    module.register_full_backward_hook(note([]))
    compiled = gradsplit.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(leaf(2, 3)).sum().backward()
    assert len(graphs) == 1


def test_pieces_round_a_hooked_child_are_graphs():
    graphs = []

    def backend(graph, examples):
        graphs.append([node.target for node in graph.graph.nodes if node.op != "placeholder"])
        return graph

    module = model()
    module[1].register_full_backward_hook(note([]))
    compiled = gradsplit.compile(module, backend=backend)
    compiled(leaf(2, 3)).sum().backward()
    assert len(graphs) == 3
