"""Which parameters are reduced: frozen, ignored, unused ones, and those that are used outside the module too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_reducer,
    data,
    pair,
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
def find_unused_parameters_keeps_the_reducer() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    stock, compiled = pair(Partial, find_unused_parameters=True)
    train((stock, compiled))
    check_reducer(compiled, "find_unused_parameters")


@case()
def unused_parameter_is_stock_ddps_error() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    _, compiled = pair(Partial)
    compiled(data(0)).sum().backward()
    try:
        compiled(data(1))
    except RuntimeError as error:
        assert "unused parameters" in str(error) or "did not receive grad" in str(error), error
    else:
        raise AssertionError("stock DDP reports unused parameters at the second forward")


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
