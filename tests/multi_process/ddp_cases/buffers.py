"""Buffers are rank 0's before each forward."""

from __future__ import annotations

from collections.abc import Callable
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
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


def with_batch_norm() -> Net:
    return Net(norm=nn.BatchNorm1d(32))


def check_steps_between_changes(
    stock: Any,
    compiled: Any,
    run: Callable[[Any, int], torch.Tensor] = lambda model, step: model(data(step)),
    steps: int = 4,
) -> None:
    """Between steps each rank changes its buffers, so that it matters whose they are."""
    for step in range(steps):
        for model in (stock, compiled):
            model.zero_grad()
            for buffer in model.module.buffers():
                buffer.data.add_((step + dist.get_rank()) / 8 if buffer.is_floating_point() else step)
            loss_of(run(model, step)).backward()
        check_gradients(stock, compiled)
        check_buffers(stock, compiled)
    check_in_graph(compiled)


@case()
def buffers_are_broadcast() -> None:
    """Before forwards of two sizes and, under ``no_grad``, of an evaluation between them."""

    def run(model: Any, step: int) -> torch.Tensor:
        if step == 3:
            model.eval()
            with torch.no_grad():
                model(data(step))
            model.train()
        return model(data(step, rows=6 - 2 * (step % 2)))

    stock, compiled = pair(with_batch_norm)
    check_steps_between_changes(stock, compiled, run, steps=5)


@case()
def buffers_that_the_forward_reads() -> None:
    stock, compiled = pair(with_batch_norm)
    for model in (stock, compiled):
        model.module.norm.eval()  # it takes the statistics that it holds, then
    check_steps_between_changes(stock, compiled)


@case()
def buffers_that_python_reads() -> None:
    """A hook in front of the graph."""

    def run(model: Any, step: int) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = model.module.register_forward_pre_hook(
            lambda module, args: seen.append(module.norm.running_mean.clone())
        )
        result = model(data(step))
        handle.remove()
        return result + seen[0]

    stock, compiled = pair(with_batch_norm)
    check_steps_between_changes(stock, compiled, run)


class Sharing(Net):
    """It reads a buffer's memory through tensors that are no buffers: an attribute's, and an argument's."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(32))
        self.register_buffer("table", torch.full((64,), 0.1))
        self.rows: Any = None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale + self.rows


@case()
def memory_of_buffers_under_another_name() -> None:
    def run(model: Any, step: int) -> torch.Tensor:
        table = model.module.table
        apart = torch.full_like(table, (step + 1) / 8)
        # First none of them is the buffer's, then one after the other.
        model.module.rows = (table if step == 2 else apart)[32:]
        return model(data(step), (table if step == 3 else apart)[:32])

    stock, compiled = pair(Sharing)
    check_steps_between_changes(stock, compiled, run, steps=5)


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
    """By other tensors, other data, and other modules; one comes where none was, and one goes."""
    stock, compiled = pair(Counting)
    rank = dist.get_rank()
    for change in range(6):
        for model in (stock, compiled):
            module = model.module
            if change == 1:
                module.calls = torch.tensor(5 + rank, device=DEVICE)
            elif change == 2:
                module.scale.data = torch.full((6, 32), 2.0 + rank, device=DEVICE)
            elif change == 3:
                module.net.norm = nn.BatchNorm1d(32, affine=False).to(DEVICE)
                module.net.norm.running_mean.fill_(rank)
            elif change == 4:
                module.net.third.register_buffer("rank", torch.tensor(rank, device=DEVICE))
            elif change == 5:
                del module.on
            model.zero_grad()
            loss_of(model(data(change))).backward()
        check_buffers(stock, compiled)
        for name in ("first", "second", "third"):
            found, expected = (getattr(model.module.net, name).weight.grad for model in (compiled, stock))
            check_close(found, expected)
    check_in_graph(compiled)


@case()
def buffers_that_get_more_of_their_memory() -> None:
    """As what a module remembers, of which it fills more and more."""

    class Remembering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.zeros(6, 32, device=DEVICE)
            self.register_buffer("filled", self.memory[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.filled.mean(0)

    def run(model: Any, step: int) -> torch.Tensor:
        module = model.module
        module.memory.fill_(1 + step + dist.get_rank())
        module.filled.data = module.memory[: (2, 5, 3, 4)[step]]
        return model(data(step))

    stock, compiled = pair(Remembering, backend="aot_eager")
    check_steps_between_changes(stock, compiled, run)


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
