"""Gradients that GPUs average by copies. Where there are none, or they do not reach one another, nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from gradsplit.distributed.collectives import averaging
from gradsplit.distributed.collectives.peer_access import reason_against
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer
from tests.multi_process.ddp_harness import (
    Net,
    ThreeTypes,
    case,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    stock_ddp,
    train,
)


def pair(make: Callable[[], nn.Module] = Net, backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    """Stock DDP, and compiled DDP whose gradients are copied."""
    settings = DDPOptions(copy_engines=True)
    return stock_ddp(make), compile_ddp(stock_ddp(make), settings, backend=backend, **options)


def check_copied(compiled: Any) -> None:
    """On GPUs that can, it is copied."""
    check_in_graph(compiled)
    buckets = inspect_ddp(compiled).buckets
    copies = {buffer.is_shared for buffer in buckets.buffers.allocated}
    assert copies == {not reason_against(buckets.group, buckets.device)}


def check_in_shared_memory(compiled: Any) -> None:
    """As nobody has views of the buckets, they are where other ranks reach them, and nothing is copied there first."""
    buffers = inspect_ddp(compiled).buckets.buffers
    assert all(flat is buffer.mine for flat, buffer in zip(buffers.flat, buffers.allocated, strict=True))


@case()
def bits_are_stock_ddps() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=8, exact=True)  # beyond the step in which the plan changes
    check_copied(compiled)
    check_in_shared_memory(compiled)


@case()
def generated_kernels_store_their_share() -> None:
    stock, compiled = pair(backend="triton")
    train((stock, compiled), steps=8)
    check_copied(compiled)


@case()
def recorded_backwards() -> None:
    stock, compiled = pair(backend="triton", mode="reduce-overhead")
    train((stock, compiled), steps=8)
    check_copied(compiled)


@case()
def accumulated_gradients() -> None:
    def step(model: Any, number: int) -> None:
        with model.no_sync():
            loss_of(model(data(2 * number))).backward()
        loss_of(model(data(2 * number + 1))).backward()

    stock, compiled = pair()
    check_steps(stock, compiled, step)
    check_copied(compiled)


@case()
def several_types() -> None:
    stock, compiled = pair(ThreeTypes)
    train((stock, compiled), steps=3, exact=True)
    check_copied(compiled)


@case()
def a_view_that_the_program_holds_keeps_its_values() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=7, exact=True)
    held, values = [], []
    for step in range(7, 11):
        views = [parameter.grad.flatten() for parameter in compiled.parameters()]
        if step < 9:  # later ones are let go
            held.append(views)
            values.append([view.clone() for view in views])
        train((stock, compiled), steps=1, exact=True, first_step=step)
        for views, expected in zip(held, values, strict=True):
            assert all(map(torch.equal, views, expected)), f"in step {step}"
    check_copied(compiled)


@case()
def another_size_and_another_module() -> None:
    """Two modules have buffers of their own over one group."""
    pairs = [pair(), pair(lambda: Net(tied=True))]
    for rows in (6, 3):

        def step(model: Any, number: int, rows: int = rows) -> None:
            loss_of(model(data(number, rows))).backward()

        for stock, compiled in pairs:
            check_steps(stock, compiled, step)
    for _, compiled in pairs:
        check_copied(compiled)


@case()
def large_buckets_by_default() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))

    stock = stock_ddp(make)
    compiled = compile_ddp(stock_ddp(make), backend="aot_eager")
    train((stock, compiled), steps=8, exact=True)
    check_in_graph(compiled)
    buckets = inspect_ddp(compiled).buckets
    can = dist.get_world_size() == 2 and not reason_against(buckets.group, buckets.device)
    for buffer in buckets.buffers.allocated:
        assert buffer.is_shared == (can and buffer.mine.nbytes >= 2**20)


class WithComplex(Net):
    """A parameter of a type that no kernel averages."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x).to(torch.complex64) @ self.turn).abs()


@case("cuda")
def complex_numbers_are_nccls() -> None:
    stock, compiled = pair(WithComplex)
    train((stock, compiled), steps=8)
    check_in_graph(compiled)


class HostEngines:
    """All but the copies: a buffer for each rank, of which the others' are not theirs, and gloo's sums."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group

    def allocate(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        of_ranks = [torch.zeros(numel, dtype=dtype) for _ in range(self._group.size())]
        return SharedBuffer(of_ranks, self._group.rank())

    def start(self, flat: torch.Tensor, buffer: SharedBuffer) -> Any:
        assert flat.shape == buffer.mine.shape
        return self._group.allreduce([flat])

    def late(self) -> str:
        return ""

    def release_waits(self) -> None:
        """Nothing waits but gloo."""


@case("cpu")
def complex_numbers_are_left_out() -> None:
    with patch.object(averaging, "find_engines", lambda *where: (HostEngines(*where), "")):
        stock, compiled = pair(WithComplex)
        train((stock, compiled), steps=8)
    for buffer in inspect_ddp(compiled).buckets.buffers.allocated:
        assert buffer.is_shared != buffer.mine.is_complex()


@case("cpu")
def buckets_lie_in_what_was_allocated() -> None:
    with patch.object(averaging, "find_engines", lambda *where: (HostEngines(*where), "")):
        stock, compiled = pair()
        train((stock, compiled), steps=8, exact=True)
    buffers = inspect_ddp(compiled).buckets.buffers
    assert all(buffer.is_shared for buffer in buffers.allocated)
    places = [parameter.grad.untyped_storage().data_ptr() for parameter in compiled.parameters()]
    assert set(places) == {buffer.mine.untyped_storage().data_ptr() for buffer in buffers.allocated}
