"""Buffers are rank 0's before each forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_buffers,
    check_close,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
    train,
)


@case()
def buffers_are_broadcast() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled))
    check_in_graph(compiled)
    check_buffers(stock, compiled)


def with_batch_norm() -> Net:
    return Net(norm=nn.BatchNorm1d(32))


@case()
def buffers_stay_local_if_they_are_not_broadcast() -> None:
    stock, compiled = pair(with_batch_norm, backend="aot_eager", broadcast_buffers=False)
    check_steps(stock, compiled, exact=False)
    check_buffers(stock, compiled)
    check_in_graph(compiled)
    means = [torch.empty(32, device=DEVICE) for _ in range(dist.get_world_size())]
    dist.all_gather(means, compiled.module.norm.running_mean)
    assert not torch.equal(means[0], means[1])


@case()
def buffers_in_evaluation() -> None:
    """Rank 0's are broadcast at a forward after training, under ``no_grad`` too, but not in a row of evaluations."""
    stock, compiled = pair(with_batch_norm, backend="aot_eager")
    check_steps(stock, compiled, exact=False, steps=2)
    for model in (stock, compiled):
        model.eval()
    for step in range(2):
        with torch.no_grad():
            check_close(compiled(data(step)), stock(data(step)))
        for model in (stock, compiled):
            model.module.norm.running_mean.add_(dist.get_rank() + 1)
    check_buffers(stock, compiled)
    for model in (stock, compiled):
        model.train()
    check_steps(stock, compiled, exact=False, steps=1)
    check_buffers(stock, compiled)
    check_in_graph(compiled)


@case()
def buffers_under_no_sync() -> None:
    def run(model: Any, step: int) -> None:
        with model.no_sync():
            for part in range(2):
                loss_of(model(data(3 * step + part))).backward()
        loss_of(model(data(3 * step + 2))).backward()

    stock, compiled = pair(with_batch_norm, backend="aot_eager")
    check_steps(stock, compiled, run, exact=False)
    check_buffers(stock, compiled)
    check_in_graph(compiled)


@case()
def a_buffer_that_the_module_counts_with() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x) / self.steps

    stock, compiled = pair(Counting, backend="aot_eager")
    check_steps(stock, compiled)
    check_buffers(stock, compiled, exact=True)
    check_in_graph(compiled)


@case("cuda")
def synchronised_batch_norm() -> None:
    """Torch's SyncBatchNorm takes tensors on a GPU only."""
    stock, compiled = pair(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(with_batch_norm()), backend="aot_eager"
    )
    check_steps(stock, compiled, exact=False)
    check_buffers(stock, compiled)
    check_in_graph(compiled)


class Counting(nn.Module):
    """Buffers of several dtypes and layouts, which a backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(norm=nn.LayerNorm(32, elementwise_affine=False))
        self.register_buffer("scale", torch.ones(32, 6).t())
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("on", torch.tensor([True, False, True]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale * self.calls


@case()
def buffers_that_are_replaced() -> None:
    """By other tensors, other data, and other modules."""
    stock, compiled = pair(Counting)
    rank = dist.get_rank()
    for change in range(4):
        for model in (stock, compiled):
            module = model.module
            if change == 1:
                module.calls = torch.tensor(5 + rank, device=DEVICE)
            elif change == 2:
                module.scale.data = torch.full((6, 32), 2.0 + rank, device=DEVICE)
            elif change == 3:
                module.net.norm = nn.BatchNorm1d(32, affine=False).to(DEVICE)
                module.net.norm.running_mean.fill_(rank)
            model.zero_grad()
            loss_of(model(data(change))).backward()
        check_buffers(stock, compiled)
        for name in ("first", "second", "third"):
            found, expected = (getattr(model.module.net, name).weight.grad for model in (compiled, stock))
            check_close(found, expected)
    check_in_graph(compiled)


class Shifted(nn.Module):
    """A module and a buffer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("shift", torch.full((32,), 1.0 + dist.get_rank(), device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.shift


@case()
def buffers_of_another_module_in_its_place() -> None:
    stock, compiled = pair(with_batch_norm)
    check_steps(stock, compiled, exact=False)
    for model in (stock, compiled._orig_mod):
        model.module = Shifted(model.module)
    for step in range(2):
        for model in (stock, compiled):
            model.zero_grad()
            loss_of(model(data(step))).backward()
        check_close(compiled.module.shift, torch.ones(32, device=DEVICE))
        check_buffers(stock, compiled)
        check_close(compiled.module.inner.third.weight.grad, stock.module.inner.third.weight.grad)
    check_in_graph(compiled)


@case()
def a_broadcast_is_no_change_of_what_was_saved() -> None:
    _, compiled = pair(Counting)
    first = loss_of(compiled(data(0)))
    loss_of(compiled(data(1))).backward()
    first.backward()
