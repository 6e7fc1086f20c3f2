"""``torch.func.functional_call``: modules with other tensors than their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import gradsplit
from tests.capture.same_as_plain import check_same


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


MODEL = model()
LINEAR = nn.Linear(4, 4)


def replaces_parameters(x, weight):
    return functional_call(MODEL, {"0.weight": weight, "2.bias": x[0, :2]}, (x,)) + MODEL(x)


def several_dictionaries(x, weight):
    return functional_call(LINEAR, ({"weight": weight}, {"bias": x[0]}), x)


def replaces_buffers(x, weight):
    statistics = {"1.running_mean": torch.zeros(4), "1.running_var": torch.ones(4)}
    result = functional_call(MODEL, statistics, (x,))
    return result, statistics


def gradients_of_parameters(x, weight):
    parameters = {name: value.detach() for name, value in LINEAR.named_parameters()}
    return grad(lambda given: functional_call(LINEAR, given, (x,)).square().sum())(parameters)


def per_sample_gradients(x, weight):
    parameters = {"weight": weight, "bias": x[0]}
    loss = grad(lambda given, row: functional_call(LINEAR, given, (row,)).square().sum())
    return vmap(loss, in_dims=(None, 0))(parameters, x)


PROGRAMS = [
    replaces_parameters, several_dictionaries, replaces_buffers, gradients_of_parameters, per_sample_gradients,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    MODEL.load_state_dict(model().state_dict())
    check_same(program, lambda: (torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)), backend=backend)


def test_an_ensemble():
    models = [nn.Linear(4, 4) for _ in range(3)]
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def program(parameters, x):
        return vmap(lambda given, row: functional_call(LINEAR, (given, buffers), (row,)), in_dims=(0, None))(
            parameters, x
        )

    compiled = gradsplit.compile(program, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    expected = torch.stack([member(x) for member in models])
    torch.testing.assert_close(compiled(parameters, x), expected)


def test_tied_parameters_run_as_plain_python():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    check_same(
        lambda x, weight: functional_call(tied, {"0.weight": weight}, (x,)),
        lambda: (torch.randn(3, 4), torch.randn(4, 4)),
        fullgraph=False,
    )


def test_a_store_to_a_table_is_seen():
    holder = nn.Module()
    holder.register_buffer("scale", torch.ones(2))

    def program(x):
        holder._buffers["scale"] = x * 2
        return x * holder.scale

    check_same(program, lambda: (torch.randn(2),), fullgraph=False)
