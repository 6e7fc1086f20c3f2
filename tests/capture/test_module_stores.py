"""What a module's code changes of the module itself: attributes, buffers, parameters, submodules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsplit
from tests.capture.same_module import check_module


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = torch.zeros(3, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("later", None)

    def forward(self, x):
        self.cache = x * 2
        self.total = self.total + 1
        self.later = x.mean()
        return self.linear(x) + self.total + self.cache


def test_attributes_and_buffers():
    check_module(Counts, captures=2)


def test_a_stored_object_is_the_object():
    module = Counts()
    module.forward = lambda x: setattr(module, "cache", x)  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    gradsplit.compile(lambda: module(x), backend="eager", fullgraph=True)()
    assert module.cache is x


class Registers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.register_buffer("kept", x.sum(0))
        self.activation = nn.ReLU()
        self.alias = self.linear
        result = self.activation(self.alias(x) + self.kept)
        del self.kept
        return result, *[name for name, _ in self.named_modules()]


def test_registration_and_deletion():
    check_module(Registers, captures=2)


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(4))
        self.other = nn.Parameter(torch.randn(4))

    def forward(self, x):
        self.one, self.other = self.other, self.one
        return x * self.one + self.other.sum()


def test_parameters_that_change_places():
    check_module(Swaps)


class Forgets(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = x if self.weight is None else x * self.weight
        self.weight = None
        return y


def test_a_parameter_that_is_dropped():
    check_module(Forgets, captures=2)


def test_a_wrong_store_raises_as_in_plain_python():
    def run(module, x):
        module.one = x

    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'one'"):
        gradsplit.compile(run, backend="eager")(Swaps(), torch.ones(4))


class Doubles(nn.Module):
    """Overrides of attribute access that go on to the module's own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def __setattr__(self, name, value):
        super().__setattr__("once" if name == "twice" else name, value)

    def forward(self, x):
        self.twice = x
        return torch.stack([torch.matmul(self.once, weight) for weight in (self.weight, self.inner.weight)])


def test_overridden_attribute_access():
    check_module(Doubles)


class CallsMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) + 1

    def forward(self, x):
        return self.linear(x)


def test_overridden_call():
    check_module(CallsMore)


def forward_of_instance():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    setattr(module[1], "forward", lambda x: x * 2)  # noqa: B010
    return module


def test_forward_of_an_instance():
    check_module(forward_of_instance)


def test_train_and_eval_in_the_frame():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))

    def run(module, x):
        module.eval()
        one = module(x)
        module.train()
        return one, module(x), module.training

    check_module(build, run)


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "cumulative average": lambda: nn.BatchNorm1d(4, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "batch norm in eval": lambda: nn.BatchNorm1d(4).eval(),
}


@pytest.mark.parametrize("build", NORMS.values(), ids=NORMS.keys())
def test_buffers_that_are_written_in_place(build):
    check_module(build)


def test_initialisation_in_the_frame():
    def run(module, x):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
        module.weight.data.mul_(0.5)
        return module(x)

    check_module(lambda: nn.Linear(4, 4), run)


def test_a_write_through_data_is_seen_by_the_guards():
    def run(one, other):
        one.data.add_(1)
        return other * 2

    compiled = gradsplit.compile(run, backend="eager")
    compiled(torch.zeros(2), torch.zeros(2))
    both = torch.zeros(2)
    assert torch.equal(compiled(both, both[:]), torch.full((2,), 2.0))


def test_clipping_the_norm_of_gradients():
    def run(module, x):
        return nn.utils.clip_grad_norm_(module.parameters(), 0.1), module(x)

    check_module(lambda: nn.Linear(4, 4), run, captures=2)
