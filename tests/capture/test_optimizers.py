"""Steps of torch's optimizers: captured whole, equal to the last bit to plain ones, compiled no more once they
have their state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


def compile_eager(function, **options):
    return CompiledFunction(function, lambda graph, inputs: graph.module, **options)


class Setup:
    """A small model with its optimizer and a sequence of gradients, the same each time it is made."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = make(self.model)
        self.generator = torch.Generator().manual_seed(1)

    def new_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=self.generator)


def assert_equal_state(one: Setup, other: Setup):
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entries in mine["state"].items():
        assert entries.keys() == theirs["state"][index].keys()
        for name, value in entries.items():
            assert type(value) is type(theirs["state"][index][name])
            assert value is None or torch.equal(value, theirs["state"][index][name])


OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.1),
    "sgd with everything": lambda model: optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True
    ),
    "sgd foreach": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adam": lambda model: optim.Adam(model.parameters(), lr=0.01),
    "adam amsgrad": lambda model: optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam foreach": lambda model: optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "adam fused": lambda model: optim.Adam(model.parameters(), lr=0.01, fused=True),
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=0.01),
    "adamw foreach": lambda model: optim.AdamW(
        model.parameters(), lr=0.01, foreach=True, amsgrad=True, maximize=True
    ),
    "adamw fused": lambda model: optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "rmsprop foreach": lambda model: optim.RMSprop(model.parameters(), foreach=True),
    "adagrad": lambda model: optim.Adagrad(model.parameters(), lr_decay=0.1),
    "adagrad foreach": lambda model: optim.Adagrad(model.parameters(), foreach=True),
    "adadelta": lambda model: optim.Adadelta(model.parameters()),
    "adamax": lambda model: optim.Adamax(model.parameters()),
    "nadam": lambda model: optim.NAdam(model.parameters()),
    "rprop": lambda model: optim.Rprop(model.parameters()),
    "asgd foreach": lambda model: optim.ASGD(model.parameters(), foreach=True, lr=torch.tensor(0.1)),
    "adafactor": lambda model: optim.Adafactor(model.parameters()),
    "sgd with a rate in a tensor": lambda model: optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
    "adam with a rate in a tensor": lambda model: optim.Adam(model.parameters(), lr=torch.tensor(0.1)),
    "rprop with a rate in a tensor": lambda model: optim.Rprop(model.parameters(), lr=torch.tensor(0.1)),
    "two groups": lambda model: optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], lr=0.01
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_are_captured_whole_and_equal_plain_ones(make):
    plain, ours = Setup(make), Setup(make)
    step = compile_eager(ours.optimizer.step, fullgraph=True)
    for _ in range(4):
        plain.new_gradients()
        ours.new_gradients()
        plain.optimizer.step()
        step()
        assert_equal_state(plain, ours)
    assert len(step.entries) <= 2  # the first step makes the state, all others find it


# What decides by the data of a step count runs as plain Python.
PLAIN = {
    "radam": lambda model: optim.RAdam(model.parameters()),
    "lbfgs": lambda model: optim.LBFGS(model.parameters(), max_iter=3),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
def test_steps_that_branch_on_data_equal_plain_ones(make):
    plain, ours = Setup(make), Setup(make)
    x = torch.randn(5, 3)

    def run(setup, step):
        def closure():
            setup.optimizer.zero_grad()
            loss = setup.model(x).square().sum()
            loss.backward()
            return loss

        return step(closure)

    step = compile_eager(lambda closure: ours.optimizer.step(closure))
    for _ in range(3):
        assert torch.equal(run(plain, plain.optimizer.step), run(ours, step))
        for mine, theirs in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_number_that_a_tensor_of_the_cpu_holds_is_compared_by_a_guard():
    """ASGD begins to average after some steps, which it reads off a tensor."""
    plain, ours = (Setup(lambda model: optim.ASGD(model.parameters(), t0=3)) for _ in range(2))
    step = compile_eager(ours.optimizer.step)
    for _ in range(8):
        plain.new_gradients()
        ours.new_gradients()
        plain.optimizer.step()
        step()
        assert_equal_state(plain, ours)
    assert len(step.entries) == 3 and all(entry.captured.graph for entry in step.entries[:2])


def test_one_capture_serves_no_other_optimizer_wrongly():
    def make(lr):
        return Setup(lambda model: optim.Adam(model.parameters(), lr=lr))

    step = compile_eager(lambda optimizer: optimizer.step(), fullgraph=True)
    for lr in (0.1, 0.2, 0.1):
        plain, ours = make(lr), make(lr)
        for _ in range(3):
            plain.new_gradients()
            ours.new_gradients()
            plain.optimizer.step()
            step(ours.optimizer)
            assert_equal_state(plain, ours)


def test_parameters_without_gradients_are_skipped():
    plain, ours = (Setup(OPTIMIZERS["adam"]) for _ in range(2))
    step = compile_eager(ours.optimizer.step, fullgraph=True)
    for frozen in (True, False, True):
        for setup in (plain, ours):
            setup.new_gradients()
            if frozen:
                next(setup.model.parameters()).grad = None
        plain.optimizer.step()
        step()
        assert_equal_state(plain, ours)


def test_hooks_of_an_optimizer():
    seen = []
    plain, ours = (Setup(OPTIMIZERS["sgd"]) for _ in range(2))
    step = compile_eager(ours.optimizer.step, fullgraph=True)

    def double(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    def note(optimizer, args, kwargs):
        seen.append(args[0] is optimizer if args else None)

    def run():
        plain.new_gradients()
        ours.new_gradients()
        plain.optimizer.step()
        step()
        assert_equal_state(plain, ours)

    run()
    handles = [setup.optimizer.register_step_pre_hook(double) for setup in (plain, ours)]
    run()
    handles += [ours.optimizer.register_step_post_hook(note)]
    run()
    run()
    assert seen == [True, True]
    for handle in handles:
        handle.remove()
    everywhere = register_optimizer_step_pre_hook(double)
    run()
    everywhere.remove()
    run()


def test_a_hook_that_replaces_the_arguments_of_a_step():
    plain, ours = (Setup(OPTIMIZERS["sgd"]) for _ in range(2))
    step = compile_eager(ours.optimizer.step, fullgraph=True)
    for setup in (plain, ours):
        setup.new_gradients()
        setup.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 3.5), {}))
    assert step() == plain.optimizer.step() == 3.5
    assert_equal_state(plain, ours)


def test_a_loaded_state_is_the_state():
    plain, ours = (Setup(OPTIMIZERS["adam"]) for _ in range(2))
    step = compile_eager(ours.optimizer.step, fullgraph=True)
    for setup, run in ((plain, plain.optimizer.step), (ours, step)):
        setup.new_gradients()
        run()
        saved = copy.deepcopy(setup.optimizer.state_dict())
        setup.new_gradients()
        run()
        setup.optimizer.load_state_dict(saved)
        setup.new_gradients()
        run()
    assert_equal_state(plain, ours)


def test_is_compiling_is_seen_by_the_user_only():
    assert compile_eager(lambda: torch.compiler.is_compiling(), fullgraph=True)()


def test_optimizers_are_captured_beside_torch_compile():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    ours = Setup(OPTIMIZERS["adam"])
    ours.new_gradients()
    compile_eager(ours.optimizer.step, fullgraph=True)()


def test_extrema_of_known_and_unknown_numbers():
    """A number that depends on data may come after several that do not."""
    source = "def scale(x, n):\n    return x * max(1.0, 2.0, x.sum().item()) * min(n, 3, x.sum().item())"
    names = {"__name__": "torch.optim.of_the_test"}
    exec(source, names)
    ours = compile_eager(names["scale"], fullgraph=True)
    for size in (1, 5, 2):
        assert torch.equal(ours(torch.ones(size), 2), names["scale"](torch.ones(size), 2))
