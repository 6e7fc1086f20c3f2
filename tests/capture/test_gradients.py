"""``.grad`` as an attribute: read, stored and changed in place by a compiled function."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import Unsupported


def compile_eager(function, **options):
    return CompiledFunction(function, lambda graph, inputs: graph.module, **options)


def parameter(gradient=None):
    made = nn.Parameter(torch.arange(3.0))
    made.grad = gradient
    return made


def test_a_gradient_is_read_and_guarded():
    def read(p):
        return p * 2 if p.grad is None else p.grad + 1

    compiled = compile_eager(read, fullgraph=True)
    assert torch.equal(compiled(parameter()), torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(compiled(parameter(torch.ones(3))), torch.full((3,), 2.0))
    assert torch.equal(compiled(parameter(torch.zeros(3))), torch.ones(3))
    assert torch.equal(compiled(parameter()), torch.tensor([0.0, 2.0, 4.0]))
    assert len(compiled.entries) == 2


def test_stores_happen_and_are_seen():
    def store(p, x):
        p.grad = x
        same = p.grad is x
        p.grad = None
        return same, p.grad is None

    compiled = compile_eager(store, fullgraph=True)
    p, x = parameter(torch.ones(3)), torch.ones(3)
    assert compiled(p, x) == (True, True)
    assert p.grad is None

    def keep(p, x):
        p.grad = x
        return p.grad

    q = parameter()
    assert compile_eager(keep, fullgraph=True)(q, x) is x
    assert q.grad is x


def test_a_stored_result_of_the_graph():
    def store(p, x):
        p.grad = x * 2

    p, x = parameter(), torch.ones(3)
    compile_eager(store, fullgraph=True)(p, x)
    assert p.grad is not None
    assert torch.equal(p.grad, torch.full((3,), 2.0)) and not p.grad.requires_grad


def test_a_store_of_another_form_raises_as_in_plain_python():
    def store(p, x):
        p.grad = x

    with pytest.raises(RuntimeError, match="assign a gradient of size"):
        compile_eager(store)(parameter(), torch.ones(4))


def test_two_parameters_that_become_one():
    def store(p, q):
        p.grad = None
        return q.grad is None

    compiled = compile_eager(store, fullgraph=True)
    assert not compiled(parameter(torch.ones(3)), parameter(torch.ones(3)))
    both = parameter(torch.ones(3))
    assert compiled(both, both)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "module"])
def test_zero_grad(owner, to_none):
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    zeroed = model if owner == "module" else torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile_eager(lambda: zeroed.zero_grad(set_to_none=to_none), fullgraph=True)
    gradient = model.weight.grad
    assert gradient is not None
    compiled()
    if to_none:
        assert model.weight.grad is None and gradient.any()
    else:
        assert model.weight.grad is gradient and not gradient.any()
    compiled()
    compiled()
    assert len(compiled.entries) <= 2


def test_gradients_accumulate_over_calls():
    plain, ours = nn.Linear(2, 2), nn.Linear(2, 2)
    ours.load_state_dict(plain.state_dict())

    def run(model, x):
        loss = model(x).square().sum()
        loss.backward()
        return loss

    compiled = compile_eager(run)
    for _ in range(3):
        x = torch.randn(4, 2)
        assert torch.equal(run(plain, x), compiled(ours, x))
        assert plain.weight.grad is not None and ours.weight.grad is not None
        assert torch.equal(plain.weight.grad, ours.weight.grad)


def test_the_gradient_of_a_result_is_left_to_python():
    def read(x):
        return (x * 2).grad

    with pytest.raises(Unsupported, match="gradient"):
        compile_eager(read, fullgraph=True)(torch.ones(3, requires_grad=True))
    assert compile_eager(lambda x: (x * 2).grad, fullgraph=True)(torch.ones(3)) is None


def test_moving_averages_of_parameters():
    def update(averages, parameters, decay):
        with torch.no_grad():
            for average, current in zip(averages, parameters, strict=True):
                average.mul_(decay).add_(current, alpha=1 - decay)

    def make():
        torch.manual_seed(0)
        return [torch.randn(3) for _ in range(3)], [nn.Parameter(torch.randn(3)) for _ in range(3)]

    plain, ours = make(), make()
    compiled = compile_eager(update, fullgraph=True)
    for _ in range(3):
        update(*plain, 0.9)
        compiled(*ours, 0.9)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], ours[0], strict=True))
    assert len(compiled.entries) == 1
