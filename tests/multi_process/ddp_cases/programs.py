"""Programs that call DDP modules and are compiled themselves, and programs with several DDP modules.

A call of a DDP module is in no graph but its own: the program's graph ends there, and the module's compiled form runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    data,
    loss_of,
    pair,
    stock_ddp,
)


def check_same_steps(
    step: Callable[..., Any], compiled_step: Callable[..., Any], stock: nn.Module, other: nn.Module
) -> None:
    for number in range(3):
        for module, function in ((stock, step), (other, compiled_step)):
            module.zero_grad()
            function(module, data(number)).backward()
        check_gradients(stock, other, exact=True)


def check_one_graph(ddp: nn.Module) -> None:
    check_in_graph(ddp)
    assert len(inspect_ddp(ddp).graphs) == 1


@case()
def a_function_that_calls_a_ddp_module() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x * 2) + 1)

    stock, other = stock_ddp(), stock_ddp()
    check_same_steps(step, gradsplit.compile(step, backend="aot_eager"), stock, other)
    check_one_graph(other)


@case()
def a_train_step() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    stock, other = stock_ddp(), stock_ddp()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (stock, other)]
    compiled = gradsplit.compile(train_step, backend="aot_eager")
    for number in range(4):
        expected = train_step(stock, optimizers[0], data(number))
        found = compiled(other, optimizers[1], data(number))
        check_close(found, expected, "loss", exact=True)
        check_gradients(stock, other, exact=True)
    check_one_graph(other)


@case()
def a_function_that_calls_a_compiled_ddp_module() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x))

    stock, other = pair(backend="aot_eager")
    check_same_steps(step, gradsplit.compile(step, backend="aot_eager"), stock, other)
    check_one_graph(other)
    assert inspect_ddp(other._orig_mod) is inspect_ddp(other)


def two_in_a_row() -> nn.Sequential:
    torch.manual_seed(3)
    first, second = nn.Linear(16, 16).to(DEVICE), nn.Linear(16, 8).to(DEVICE)
    return nn.Sequential(DistributedDataParallel(first), nn.Tanh(), DistributedDataParallel(second))


@case()
def a_sequence_of_ddp_modules() -> None:
    stock, other = two_in_a_row(), two_in_a_row()
    compiled = gradsplit.compile(other, backend="aot_eager")
    for number in range(3):
        for module, run in ((stock, stock), (other, compiled)):
            module.zero_grad()
            loss_of(run(data(number))).backward()
        check_gradients(stock, other, exact=True)
    for ddp in (other[0], other[2]):
        check_one_graph(ddp)


@case()
def a_sequence_of_compiled_ddp_modules() -> None:
    stock, other = two_in_a_row(), two_in_a_row()
    for index in (0, 2):
        other[index] = gradsplit.compile(other[index], backend="aot_eager")
    for number in range(3):
        for module in (stock, other):
            module.zero_grad()
            loss_of(module(data(number))).backward()
        check_gradients(stock, other, exact=True)
    for ddp in (other[0], other[2]):
        check_one_graph(ddp)


@case()
def ddp_of_a_sequence() -> None:
    stock, compiled = pair(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)), "aot_eager")
    check_same_steps(lambda model, x: loss_of(model(x)), lambda model, x: loss_of(model(x)), stock, compiled)
    check_one_graph(compiled)


@case()
def two_modules_that_train_against_each_other() -> None:
    """As in a GAN: the second backward goes through both, and only one of them takes its gradients."""

    def make() -> tuple[nn.Module, nn.Module]:
        return stock_ddp(lambda: nn.Linear(16, 16)), stock_ddp(
            lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh())
        )

    def step(generator: nn.Module, critic: nn.Module, x: torch.Tensor) -> None:
        made = generator(x)
        critic.zero_grad()
        (critic(x).mean() - critic(made.detach()).mean()).backward()
        generator.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        critic(made).mean().backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)

    stock, others = make(), make()
    compiled = [gradsplit.compile(module, backend="aot_eager") for module in others]
    for number in range(3):
        step(*stock, data(number))
        step(*compiled, data(number))
        for expected, found in zip(stock, others, strict=True):
            check_gradients(expected, found)
    for module in compiled:
        check_in_graph(module)


@case()
def no_sync_in_a_compiled_function() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            loss_of(model(x)).backward()
        return loss_of(model(x + 1))

    stock, other = stock_ddp(), stock_ddp()
    check_same_steps(step, gradsplit.compile(step, backend="aot_eager"), stock, other)
    check_in_graph(other)


@case()
def a_module_without_gradients_in_a_compiled_function() -> None:
    def step(model: nn.Module, teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).square().mean()

    compiled = gradsplit.compile(step, backend="aot_eager")
    stock, other = stock_ddp(), stock_ddp()
    teachers = [stock_ddp(lambda: Net(tied=True)) for _ in range(2)]
    for number in range(3):
        for module, teacher, function in ((stock, teachers[0], step), (other, teachers[1], compiled)):
            module.zero_grad()
            function(module, teacher, data(number)).backward()
        check_gradients(stock, other, exact=True)
    check_one_graph(other)
    assert all(parameter.grad is None for parameter in teachers[1].parameters())


@case()
def hooks_of_a_module_that_a_compiled_function_calls() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x))

    stock, other = stock_ddp(), stock_ddp()
    for module in (stock, other):
        module.register_forward_hook(lambda module, args, output: output * 3)
    check_same_steps(step, gradsplit.compile(step, backend="aot_eager"), stock, other)
    check_in_graph(other)


@case()
def fullgraph() -> None:
    stock, compiled = pair(backend="aot_eager", fullgraph=True)
    check_same_steps(lambda model, x: loss_of(model(x)), lambda model, x: loss_of(model(x)), stock, compiled)
    check_one_graph(compiled)


@case()
def fullgraph_of_functions() -> None:
    """The calls of DDP modules are graphs of their own, and may be; nothing else is plain Python."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x * 2) + 1)

    stock, other = stock_ddp(), stock_ddp()
    check_same_steps(step, gradsplit.compile(step, backend="aot_eager", fullgraph=True), stock, other)
    check_one_graph(other)
