"""The compiled module is the module itself in all but its call."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule, wrap_module


class Net(nn.Module):
    """A net."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def itself(self) -> Net:
        return self


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def compiled(net: Net) -> CompiledModule:
    return wrap_module(net, lambda *args, **kwargs: ("ran", args, kwargs))


def test_calls_run_what_was_compiled(compiled):
    assert compiled(1, key=2) == ("ran", (1,), {"key": 2})


def test_is_an_instance_of_the_modules_class(compiled, net):
    assert isinstance(compiled, Net) and isinstance(compiled, CompiledModule)
    assert type(compiled).__name__ == "Net" and type(compiled).__doc__ == "A net."
    assert compiled._orig_mod is net


def test_state_is_shared(compiled, net):
    assert compiled.state_dict().keys() == net.state_dict().keys()
    assert all(a is b for a, b in zip(compiled.parameters(), net.parameters(), strict=True))
    compiled.linear = nn.Linear(2, 5)
    compiled.extra = 3
    assert net.linear.out_features == 5 and net.extra == 3
    net.eval()
    assert not compiled.training


def test_loading_a_state_dict(compiled, net):
    state = {name: torch.full_like(value, 2) for name, value in net.state_dict().items()}
    compiled.load_state_dict(state)
    assert net.count == 2


def test_methods_that_return_self_return_the_compiled_module(compiled):
    assert compiled.train() is compiled
    assert compiled.double() is compiled
    assert compiled.itself() is compiled
    assert compiled.linear.weight.dtype is torch.float64


def test_forward_is_the_plain_one(compiled):
    assert compiled.forward(torch.ones(2)).shape == (3,)


def test_names_of_submodules_do_not_change(compiled, net):
    assert dict(compiled.named_modules()).keys() == dict(net.named_modules()).keys()


def test_copies_and_pickles_are_plain(compiled, net):
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert type(copied) is Net
        assert torch.equal(copied.linear.weight, net.linear.weight)
        assert copied.linear.weight is not net.linear.weight


def test_saving_with_torch(compiled, net):
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Net


def test_print(compiled, net):
    assert repr(compiled) == repr(net)


def test_module_as_part_of_another(compiled):
    outer = nn.Sequential(compiled)
    assert list(outer.state_dict()) == ["0.count", "0.linear.weight", "0.linear.bias"]
    assert outer(1)[0] == "ran"


def test_a_forward_that_is_replaced_after_the_first_call():
    """On the module, back, and on the class; submodules' are guarded where they are called."""

    class Doubling(nn.Module):
        def forward(self, x, times=2):
            return x * times

    module = Doubling()
    compiled = gradsplit.compile(module)
    x = torch.ones(3)
    assert compiled(x).tolist() == [2.0] * 3
    module.forward = lambda x, times=5: x * times
    assert compiled(x).tolist() == [5.0] * 3 and compiled(x, times=7).tolist() == [7.0] * 3
    del module.forward
    assert compiled(x).tolist() == [2.0] * 3
    Doubling.forward = lambda self, x: x - 1
    assert compiled(x).tolist() == [0.0] * 3
