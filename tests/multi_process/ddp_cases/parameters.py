"""Which parameters are reduced: frozen, ignored, unused ones, and those that are used outside the module too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit import CompileError
from gradsplit.compile_core.autograd.captured_graphs import joined_linears
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_reducer,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
    stock_ddp,
    train,
)


@case()
def parameter_used_outside_the_module_too() -> None:
    stock, compiled = pair()
    for step in range(2):
        for model in (stock, compiled):
            model.zero_grad()
            decay = model.module.second.weight.square().sum() * (1 + dist.get_rank())
            (model(data(step)).square().mean() + 0.1 * decay).backward()
        check_gradients(stock, compiled)


@case()
def backward_that_bypasses_the_module() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    for model in (stock, compiled):
        model.zero_grad()
        (model.module.second.weight.square().sum() * (1 + dist.get_rank())).backward()
    check_close(compiled.module.second.weight.grad, stock.module.second.weight.grad)


@case()
def unused_parameters_stay_without_gradients() -> None:
    """As where stock DDP looks for them, which costs it a walk in each step; it is an error to it where it does not."""

    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    check_steps(stock_ddp(Partial, find_unused_parameters=True), pair(Partial)[1], exact=False)


@case()
def frozen_parameters() -> None:
    def make() -> Net:
        net = Net()
        net.second.weight.requires_grad_(False)
        net.first.bias.requires_grad_(False)
        return net

    stock, compiled = pair(make)
    train((stock, compiled))
    check_in_graph(compiled)


@case()
def ignored_parameters_stay_local() -> None:
    def make() -> Net:
        net = Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight"])
        return net

    stock, compiled = pair(make)
    for model in (stock, compiled):
        model(data(0)).square().mean().backward()
    for (name, expected), found in zip(stock.named_parameters(), compiled.parameters(), strict=True):
        check_close(found.grad, expected.grad, name)
    check_in_graph(compiled)


class Adapted(nn.Module):
    """LoRA: a frozen layer beside a trained product of two thin ones."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_adapters() -> Net:
    net = Net()
    net.norm.requires_grad_(False)
    net.first, net.second, net.third = Adapted(net.first), Adapted(net.second), Adapted(net.third)
    return net


@case()
def adapters_train_on_a_frozen_base() -> None:
    stock, compiled = pair(with_adapters, backend="aot_eager")
    check_steps(stock, compiled)
    check_in_graph(compiled)
    assert sum(len(bucket.parameters) for bucket in inspect_ddp(compiled).plan.buckets) == 6


@case()
def base_layers_thawed_between_steps_stay_local() -> None:
    """Stock DDP reduces what needed gradients when it was made; what is thawed later is each rank's own business."""
    stock, compiled = pair(with_adapters, backend="aot_eager")
    check_steps(stock, compiled)
    for model in (stock, compiled):
        model.module.second.layer.weight.requires_grad_(True)
        model.zero_grad()
        loss_of(model(data(5))).backward()
    check_gradients(stock, compiled, exact=True, synchronised=False)
    check_in_graph(compiled)


@case()
def parameters_frozen_between_steps() -> None:
    """Stock DDP waits for the frozen parameter's gradient, unless it looks for unused ones."""

    def run(model: Any, step: int) -> None:
        model.module.second.weight.requires_grad_(step != 1)
        plain_step(model, step)

    check_steps(stock_ddp(find_unused_parameters=True), pair(backend="aot_eager")[1], run)


@case()
def parameters_frozen_in_the_first_call() -> None:
    """As those of a GAN's generator, whose first call makes images for the other module."""
    stock, compiled = pair(backend="aot_eager")
    for model in (stock, compiled):
        model.requires_grad_(False)
        model(data(0))
        model.requires_grad_(True)
    check_steps(stock, compiled)
    check_in_graph(compiled)
    for model in (stock, compiled):
        model.requires_grad_(False)
    # It is made again, for all parameters.
    assert compiled._orig_mod.reducer is not None
    for model in (stock, compiled):
        model.requires_grad_(True)
    check_steps(stock, compiled._orig_mod)


@case()
def parameters_thawed_before_the_first_call() -> None:
    """They needed no gradients when the module was wrapped, so they stay each rank's own."""

    def make() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    stock, compiled = pair(make, backend="aot_eager")
    for model in (stock, compiled):
        model.requires_grad_(True)
    check_steps(stock, compiled, synchronised=False)
    check_in_graph(compiled)


@case()
def parameters_converted_between_steps() -> None:
    """Stock DDP goes on with buckets of the old type, and leaves each rank with gradients of its own."""
    _, compiled = pair(backend="aot_eager")
    loss_of(compiled(data(0))).backward()
    compiled.double()
    with pytest.raises(CompileError, match=r"first\.weight was float32.* and is float64"):
        compiled(data(1).double())


@case()
def parameters_that_get_other_memory() -> None:
    """Also memory of other strides, which stock DDP mixes up."""
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, steps=2)
    for model in (stock, compiled):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    check_steps(stock, compiled, steps=2)
    weight = compiled.module.second.weight
    weight.data = weight.data.t().contiguous().t()
    # Products of a transposed matrix may add up in another order.
    check_steps(stock, compiled, steps=2, exact=False)
    check_in_graph(compiled)


@case()
def ignored_buffers_and_parameters() -> None:
    def make() -> Net:
        net = Net(norm=nn.BatchNorm1d(32))
        ignored = ["second.weight", "second.bias", "norm.running_mean"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        return net

    stock, compiled = pair(make, backend="aot_eager")
    check_steps(stock, compiled, exact=False, steps=1, synchronised=False)
    check_in_graph(compiled)
    reduced = {place.name for bucket in inspect_ddp(compiled).plan.buckets for place in bucket.parameters}
    assert "second.weight" not in reduced and "first.weight" in reduced


@case()
def all_parameters_ignored_but_one() -> None:
    def make() -> Net:
        net = Net()
        ignored = [name for name, _ in net.named_parameters() if name != "second.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        return net

    stock, compiled = pair(make, backend="aot_eager")
    check_steps(stock, compiled, synchronised=False)
    check_in_graph(compiled)


@case()
def mixed_dtypes_in_one_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.short = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.bfloat16)
            self.long, self.last = nn.Linear(16, 16, dtype=torch.float64), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.short(self.first(x).tanh().bfloat16())
            return self.last(self.long(x.double()).tanh().float())

    stock, compiled = pair(Mixed, backend="aot_eager", bucket_cap_mb=25)
    check_steps(stock, compiled)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).plan.buckets) >= 3


@case()
def parameters_given_to_the_forward() -> None:
    """Found by identity: in keyword arguments, lists and mappings, and as attributes that are no parameters' names."""

    class Given(Net):
        def forward(self, x: torch.Tensor, weights: Any = None, *, more: Any) -> torch.Tensor:
            x = self.norm(nn.functional.linear(x, more["first"][0], more["first"][1]))
            return nn.functional.linear(self.second(x).tanh(), *weights)

    def run(model: Any, step: int) -> None:
        net = model.module
        more = {"first": [net.first.weight, net.first.bias]}
        loss_of(model(data(step), (net.third.weight, net.third.bias), more=more)).backward()

    stock, compiled = pair(Given, backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def other_parameters_for_a_call() -> None:
    """The first call is an evaluation of averages, in the places of all parameters or of one; the others train."""
    for replaced in (lambda name: True, lambda name: name == "module.second.weight"):
        stock, compiled = pair(backend="aot_eager")
        averages = {name: p.detach() * 0.5 for name, p in stock.named_parameters() if replaced(name)}
        for _ in range(2):
            with torch.no_grad():
                expected, found = (
                    functional_call(model, averages, (data(5),)) for model in (stock, compiled)
                )
            check_close(found, expected, exact=True)
            check_steps(stock, compiled, steps=2)
        check_in_graph(compiled)


@case()
def gradient_as_bucket_view() -> None:
    stock, compiled = pair(backend="aot_eager", gradient_as_bucket_view=True)
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def a_parameter_that_is_not_contiguous() -> None:
    def make() -> Net:
        net = Net()
        net.second.weight = nn.Parameter(torch.randn(32, 32).t())
        return net

    stock, compiled = pair(make, backend="aot_eager", gradient_as_bucket_view=True)
    check_steps(stock, compiled)
    check_stored(stock, compiled)


def check_stored(stock: nn.Module, compiled: nn.Module) -> None:
    """The compiled backward stores all gradients itself, with the strides that they have in stock DDP."""
    (graph,) = inspect_ddp(compiled).graphs
    stored = graph.backward.schedule.destinations
    assert set(stored) == {name for name, _ in compiled.module.named_parameters()}
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        assert found.grad.stride() == expected.grad.stride()


@case()
def convolutions_that_are_channels_last() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Conv2d(1, 8, 2), nn.Conv2d(8, 6, 2), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.reshape(-1, 1, 4, 4)).relu()
            return self.last(self.second(x).relu().mean((2, 3)))

    for backend in ("aot_eager", "triton"):
        stock, compiled = pair(
            lambda: Images().to(memory_format=torch.channels_last),
            backend=backend,
            gradient_as_bucket_view=True,
        )
        train((stock, compiled), exact=backend == "aot_eager")
        check_stored(stock, compiled)


@case("cpu")
def layers_of_one_input() -> None:
    """They are one product, as on a GPU; each parameter's gradient is reduced as one of its own."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 8), nn.Linear(16, 8, bias=False), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.gate(x).tanh() * self.up(x))

    gain = mock.Mock(return_value=True)
    with mock.patch.object(joined_linears, "gain", gain):
        for options in ({}, {"bucket_cap_mb": 0.0003}, {"gradient_as_bucket_view": True}):
            stock, compiled = pair(Gated, **options)
            check_steps(stock, compiled, exact=False)
            check_stored(stock, compiled)
    assert gain.called


@case("cpu")
def a_sparse_embedding() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.table((x * 3).long() % 10))

    stock, compiled = pair(Sparse, backend="aot_eager")
    for step in range(2):
        for model in (stock, compiled):
            model.zero_grad()
            loss_of(model(data(step))).backward()
            model.module.table.weight.grad = model.module.table.weight.grad.to_dense()
        check_gradients(stock, compiled, exact=True)


class Headed(nn.Module):
    """An encoder that other modules may have, too."""

    def __init__(self, encoder: nn.Module, results: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(32, results)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def two_heads() -> list[nn.Module]:
    torch.manual_seed(7)
    encoder = Net()
    return [Headed(encoder, results).to(DEVICE) for results in (3, 5)]


def wrapped(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.004)


def check_heads(stock: list[Any], compiled: list[Any], steps: range) -> None:
    """One backward through all modules of each list."""
    for step in steps:
        for modules in (stock, compiled):
            for module in modules:
                module.zero_grad()
            losses = [loss_of(module(data(step + 50 * number))) for number, module in enumerate(modules)]
            torch.stack(losses).sum().backward()
        for expected, found in zip(stock, compiled, strict=True):
            check_gradients(expected, found)


@case()
def an_encoder_in_two_modules() -> None:
    stock = [*map(wrapped, two_heads())]
    compiled = [gradsplit.compile(wrapped(module), backend="aot_eager") for module in two_heads()]
    check_heads(stock, compiled, range(3))
    for module in compiled:
        check_reducer(module, "another DDP module has some of its parameters")


def gets_encoder_later(form_of: Callable[[nn.Module], Any]) -> Any:
    """What was compiled before another module got its encoder, in this form, and one backward reached both."""
    stock = [*map(wrapped, two_heads())]
    actor, critic = two_heads()
    compiled = [gradsplit.compile(wrapped(actor), backend="aot_eager")]
    check_heads(stock[:1], compiled, range(2))
    check_in_graph(compiled[0])
    compiled.append(form_of(wrapped(critic)))
    check_heads(stock, compiled, range(2, 5))
    return compiled[0]


@case()
def an_encoder_that_another_module_gets_later() -> None:
    gets_encoder_later(partial(gradsplit.compile, backend="aot_eager"))


@case()
def an_encoder_that_a_plain_module_gets_later() -> None:
    first = gets_encoder_later(lambda module: module)
    check_reducer(first, "another DDP module has some of its parameters")


@case()
def a_module_that_is_wrapped_again() -> None:
    """What wrapped it before is gone, and takes no part."""
    stock, compiled = pair(backend="aot_eager")
    train((stock, compiled), steps=2)
    stock = DistributedDataParallel(stock.module)
    compiled = gradsplit.compile(DistributedDataParallel(compiled.module), backend="aot_eager")
    train((stock, compiled), steps=2)
    check_in_graph(compiled)


@case()
def two_forms_of_a_module_in_one_backward() -> None:
    ddp = stock_ddp()
    forms = [gradsplit.compile(ddp, backend="aot_eager", dynamic=dynamic) for dynamic in (False, True)]
    losses = [loss_of(form(data(0))) for form in forms]
    with pytest.raises(CompileError, match="two compiled forms"):
        torch.stack(losses).sum().backward()
