"""Whole train steps compiled as one function, forward, backward and the optimizer's step: each is one graph, and after
the second step nothing is captured any more."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn, optim

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Run:
    """A model, its optimizer, and data, the same each time it is made."""

    def __init__(self, make_optimizer):
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer: Any = make_optimizer(self.model.parameters())
        self.batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(10)]
        self.notes: list[Any] = []
        self.other = optim.SGD([next(self.model.parameters())], lr=0.05)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]


def train(run, batch):
    x, target = batch
    run.optimizer.zero_grad(True)
    loss = nn.CrossEntropyLoss()(run.model(x), target)
    loss.backward()
    run.optimizer.step()
    return loss


def all_functions(compiled):
    found = [compiled]
    for function in found:
        found += [other for other in (*function.continuations, *function.callees) if other not in found]
    return found


def count_captures(compiled):
    return sum(len(function.entries) for function in all_functions(compiled))


def break_reasons(compiled):
    return [reason for function in all_functions(compiled) for reason in function.break_reasons]


def check_training(step, make_optimizer, *, backend="eager", exact=True, settled_after=2):
    """Ten steps plain and compiled; returns the compiled function."""
    plain, ours = Run(make_optimizer), Run(make_optimizer)
    compiled = gradsplit.compile(step, backend=backend)
    captures = []
    for expected_batch, batch in zip(plain.batches, ours.batches, strict=True):
        expected, found = step(plain, expected_batch), compiled(ours, batch)
        captures.append(count_captures(compiled))
        if exact:
            assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))
        else:
            torch.testing.assert_close(
                torch.as_tensor(found), torch.as_tensor(expected), rtol=2e-4, atol=1e-5
            )
    for one, other in zip(plain.model.state_dict().values(), ours.model.state_dict().values(), strict=True):
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(other, one, rtol=2e-3, atol=1e-4)
    assert plain.notes == ours.notes
    assert len(set(captures[settled_after - 1 :])) == 1, captures
    return compiled


OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "sgd with momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01),
    "adam foreach": lambda parameters: optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw fused": lambda parameters: optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_is_one_graph(make_optimizer):
    compiled = check_training(train, make_optimizer)
    assert not break_reasons(compiled)
    # Without gradients and state before, and with some.
    assert len(all_functions(compiled)) == 1 and count_captures(compiled) <= 2


def test_train_steps_beside_torch_compile():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    compiled = check_training(train, OPTIMIZERS["adam"])
    assert not break_reasons(compiled)


def test_old_gradients_are_gone_when_a_step_computes_new_ones():
    alive = []

    def backend(graph, inputs):
        def run(*given):
            alive.append([old() is not None for old in olds])
            return graph(*given)

        return run

    run = Run(OPTIMIZERS["sgd"])
    compiled = gradsplit.compile(train, backend=backend)
    olds: list[Any] = []
    for batch in run.batches[:4]:
        compiled(run, batch)
        olds[:] = [weakref.ref(parameter.grad) for parameter in run.model.parameters()]
    assert len(compiled.entries) == 2
    assert not any(alive[-1]) and len(alive[-1]) == len(olds)


def mixed_precision(run, batch):
    x, target = batch
    run.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(run.model(x), target)
    loss.backward()
    run.optimizer.step()
    return loss


def clipped(run, batch):
    x, target = batch
    run.optimizer.zero_grad()
    nn.functional.cross_entropy(run.model(x), target).backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()
    return norm


def with_average(run, batch):
    loss = train(run, batch)
    with torch.no_grad():
        for average, current in zip(run.average, run.model.parameters(), strict=True):
            average.mul_(0.9).add_(current, alpha=0.1)
    return loss


def two_optimizers(run, batch):
    x, target = batch
    run.optimizer.zero_grad()
    run.other.zero_grad()
    loss = nn.functional.cross_entropy(run.model(x), target)
    loss.backward()
    run.optimizer.step()
    run.other.step()
    return loss


def by_hand(run, batch):
    x, target = batch
    loss = nn.functional.cross_entropy(run.model(x), target)
    loss.backward()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss


def weights_clamped(run, batch):
    loss = train(run, batch)
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.3, 0.3)
    return loss


def over_batches(run, batch):
    total = 0.0
    for part in run.batches[:3]:
        total = total + train(run, part).detach()
    return total


@torch.no_grad()
def evaluated(run, batch):
    x, target = batch
    run.model.eval()
    result = run.model(x)
    run.model.train()
    return (result.argmax(-1) == target).float().mean()


def with_notes(run, batch):
    loss = train(run, batch)
    run.notes.append(loss.item())
    return loss


@pytest.mark.parametrize(
    ("step", "settled_after"),
    [
        (mixed_precision, 2), (clipped, 2), (with_average, 2), (two_optimizers, 2), (by_hand, 2),
        (weights_clamped, 2), (over_batches, 2), (evaluated, 3), (with_notes, 10),
    ],
)  # fmt: skip
def test_kinds_of_steps(step, settled_after):
    check_training(step, OPTIMIZERS["adam"], settled_after=settled_after)


def test_accumulated_gradients():
    counts = iter([*range(10), *range(10)])

    def step(run, batch):
        x, target = batch
        loss = nn.functional.cross_entropy(run.model(x), target) / 2
        loss.backward()
        if (next(counts) + 1) % 2 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        return loss

    plain, ours = Run(OPTIMIZERS["adam"]), Run(OPTIMIZERS["adam"])
    expected = [step(plain, batch).item() for batch in plain.batches]
    compiled = gradsplit.compile(step, backend="eager")
    assert [compiled(ours, batch).item() for batch in ours.batches] == expected


SCHEDULERS = {
    "steps": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_rates_that_change(make):
    def make_optimizer(parameters):
        optimizer: Any = optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer.scheduler = make(optimizer)
        return optimizer

    def step(run, batch):
        loss = train(run, batch)
        run.optimizer.scheduler.step()
        return loss

    check_training(step, make_optimizer, settled_after=10)


@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
def test_other_backends(backend):
    # The bias before the norm has a gradient of nothing but rounding, which Adam would blow up.
    check_training(train, OPTIMIZERS["sgd with momentum"], backend=backend, exact=False)


def test_the_first_call_gives_lazy_modules_their_parameters():
    """It runs as plain Python; all others are one graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyBatchNorm1d())
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = gradsplit.compile(model, backend=backend, fullgraph=True)
    compiled(torch.randn(4, 5))
    assert not graphs and type(model[0]) is nn.Linear
    for _ in range(2):
        x = torch.randn(4, 5)
        expected = copy.deepcopy(model)(x)
        assert torch.equal(compiled(x), expected)
    assert len(graphs) == 1
