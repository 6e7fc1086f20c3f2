"""Parameters that a program makes, leaves of its own, and results whose gradients it retains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.errors import Unsupported
from tests.capture.same_as_plain import check_same

BACKENDS = ["eager", "aot_eager", "triton"]


def only_used(x):
    scale = nn.Parameter(torch.full((4,), 2.0))
    return x * scale + nn.Parameter(torch.ones(4), False), isinstance(scale, nn.Parameter), scale.grad


def handed_out(x):
    weight = nn.Parameter(x * 2)
    return x @ weight.t(), weight, type(weight)


def without_gradients(x):
    index = nn.Parameter(torch.arange(4), requires_grad=False)
    return x * index, index, nn.Parameter(x, False), nn.Parameter(nn.Parameter(x * 2, False))


def changed_as_layers_begin(x):
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.5)
    layer.bias.data.zero_()
    return layer(x), layer.weight.requires_grad


def listed(x):
    scales = nn.ParameterList([nn.Parameter(torch.ones(4) * number) for number in range(3)])
    return sum(x * scale for scale in scales), nn.Buffer(torch.ones(4)) * x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "program", [only_used, handed_out, without_gradients, changed_as_layers_begin, listed]
)
def test_made_in_the_frame(program, backend):
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True),), backend=backend)


class Lazy(nn.Module):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_parameter("scale", nn.Parameter(torch.ones(x.shape[-1])))
            self.layer = nn.Linear(x.shape[-1], 2)
        return self.layer(x * self.scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_makes_its_parameters_in_its_first_call(backend):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Lazy()
        call = gradsplit.compile(module, backend=backend, fullgraph=True) if compiled else module
        for _ in range(3):
            call(torch.ones(3, 4)).sum().backward()
        found.append({name: (p.detach(), p.grad) for name, p in module.named_parameters()})
        assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    torch.testing.assert_close(found[1], found[0])


LEAVES = {
    "of its own": lambda x: (x * 2).detach().requires_grad_(),
    "parameter": lambda x: nn.Parameter(x * 2),
    "view": lambda x: (x * 2).detach().requires_grad_().view(-1),
    "view of an input": lambda x: x.detach().view(-1).requires_grad_(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_leaves_made_where_no_gradients_are(make, backend):
    """They gather gradients of their own, and hand none on."""
    x = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        expected, found = make(x), gradsplit.compile(make, backend=backend, fullgraph=True)(x)
    assert found.is_leaf and found.requires_grad and type(found) is type(expected)
    (found * 3).sum().backward()
    assert x.grad is None
    if expected._base is None:
        assert torch.equal(found.grad, torch.full((2, 2), 3.0))


KEPT: list[torch.Tensor] = []


def retained(x):
    hidden = x * 2
    hidden.retain_grad()
    KEPT.append(hidden)
    loss = (hidden**2).sum()
    x.retain_grad()
    return loss, hidden


def retained_and_changed(x):
    hidden = x * 2
    hidden.retain_grad()
    hidden.mul_(3)
    KEPT.append(hidden)
    return hidden.sin()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [retained, retained_and_changed])
def test_a_result_retains_its_gradient(program, backend):
    """All of it: also what comes of other results of the same graph."""
    KEPT.clear()
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True),), backend=backend)
    gradients = [kept.grad for kept in KEPT]
    for expected, found in zip(gradients[::2], gradients[1::2], strict=True):
        torch.testing.assert_close(found, expected)


def refused_where_there_are_none(x):
    try:
        (x.detach() * 2).retain_grad()
    except RuntimeError as error:
        return x * 2, str(error)


def test_a_result_without_gradients_retains_none():
    check_same(refused_where_there_are_none, lambda: (torch.randn(3, requires_grad=True),))


def test_parameters_of_other_things_are_refused():
    with pytest.raises(Unsupported, match="a parameter of"):
        gradsplit.compile(lambda x: nn.Parameter(x.numpy()), backend="eager", fullgraph=True)(torch.ones(2))
