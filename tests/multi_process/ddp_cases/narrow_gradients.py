"""Gradients that autocast computes in 16 bits, and that are stored and sent as such between GPUs; gloo's ranks are made
to store them so, too, and cast them where they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed import DDPOptions, compile_ddp, inspect_ddp
from distributed.collectives.averaging import Averaging
from tests.multi_process.ddp_cases.copy_engines import check_in_shared_memory
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    PartlyPlain,
    Step,
    case,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    stock_ddp,
)


@contextmanager
def sent_as_computed() -> Iterator[None]:
    if DEVICE == "cuda" or dist.get_world_size() != 2:
        yield
        return
    with patch.object(Averaging, "sends_narrow", PropertyMock(return_value=True)):
        yield


class Pair:
    """Compiled DDP whose gradients are sent in 32 bits, as other cases compare it with stock DDP, and one whose
    gradients are sent as they are computed."""

    def __init__(
        self, make: Callable[[], nn.Module] = Net, backend: str = "aot_eager", **ddp_options: Any
    ) -> None:
        self.wide = compile_ddp(
            stock_ddp(make, **ddp_options), DDPOptions(copy_engines=False), backend=backend
        )
        options = DDPOptions(copy_engines=True if DEVICE == "cuda" else None)
        self.narrow = compile_ddp(stock_ddp(make, **ddp_options), options, backend=backend)

    def check(self, step: Step, steps: int = 8) -> list[bool]:
        """Their gradients are the same to the bit. Returns for each bucket that was sent whether all of its 16-bit
        gradients were sent as such."""
        sent: list[bool] = []
        start = Averaging.start

        def noted(averaging: Any, flat: Any, buffer: Any, values: Any = None) -> Any:
            buckets = inspect_ddp(self.narrow).buckets
            # Those that measure the link are nobody's.
            if (
                buffer.narrow is not None
                and buckets is not None
                and any(buffer is one for one in buckets._buffers.allocated)
            ):
                sent.append(values is not None)
            return start(averaging, flat, buffer, values)

        with sent_as_computed(), patch.object(Averaging, "start", noted):
            check_steps(self.wide, self.narrow, step, steps)
        check_in_graph(self.narrow)
        buckets = inspect_ddp(self.narrow).buckets
        has_parts = any(buffer.narrow is not None for buffer in buckets._buffers.allocated)
        assert has_parts == (dist.get_world_size() == 2)
        return sent


def forward_backward(model: Any, number: int, rows: int = 6) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = loss_of(model(data(number, rows)))
    loss.backward()


@case()
def products() -> None:
    pair = Pair()
    assert all(pair.check(forward_backward))
    check_in_shared_memory(pair.narrow)


@case()
def generated_kernels() -> None:
    assert all(Pair(backend="triton").check(forward_backward))


@case()
def several_graphs_and_plain_python() -> None:
    Pair(PartlyPlain).check(forward_backward)


@case()
def a_tied_weight_gets_two_summands() -> None:
    Pair(lambda: Net(tied=True)).check(forward_backward)


@case()
def accumulated_gradients() -> None:
    def step(model: Any, number: int) -> None:
        with model.no_sync():
            forward_backward(model, 2 * number)
        forward_backward(model, 2 * number + 1)

    assert not any(Pair().check(step))


@case()
def only_one_rank_holds_gradients() -> None:
    def step(model: Any, number: int) -> None:
        if dist.get_rank() == number % 2:
            model.zero_grad(set_to_none=False)
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += 0.1
        forward_backward(model, number)

    sent = Pair().check(step)
    assert any(sent) == (not all(sent)) == (dist.get_world_size() == 2)


@case()
def one_parameter_holds_a_gradient() -> None:
    def step(model: Any, number: int) -> None:
        (first, *_) = model.parameters()
        first.grad = torch.ones_like(first)
        forward_backward(model, number)

    Pair().check(step)


@case()
def only_one_rank_has_hooks() -> None:
    for rank in range(2):
        pair = Pair()
        for model in (pair.wide, pair.narrow):
            if dist.get_rank() == rank:
                model.module.second.weight.register_hook(lambda gradient: gradient * 2)
        pair.check(forward_backward)


@case()
def several_backwards_of_one_forward() -> None:
    def step(model: Any, number: int) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(model(data(number)))
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()

    Pair().check(step, steps=4)


@case()
def two_forwards_before_one_backward() -> None:
    def step(model: Any, number: int) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(model(data(2 * number))) + loss_of(model(data(2 * number + 1)))
        loss.backward()

    Pair().check(step, steps=4)


@case()
def other_sizes_and_other_types() -> None:
    """A graph for calls without autocast stores its gradients in 32 bits."""

    def step(model: Any, number: int) -> None:
        if number % 3 == 2:
            loss_of(model(data(number))).backward()
        else:
            forward_backward(model, number, rows=6 - number % 2)

    Pair().check(step, steps=9)


class PartlyNarrow(Net):
    """One layer is computed in 32 bits, of which another is chosen from outside; all share a bucket."""

    def forward(self, x: torch.Tensor, wide: int) -> torch.Tensor:
        for number, layer in enumerate((self.first, self.second, self.third)):
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=number != wide):
                x = torch.tanh(layer(x.float()))
        return self.norm(x.float())


@case()
def one_layer_without_autocast() -> None:
    def step(model: Any, number: int) -> None:
        loss_of(model(data(number), number % 4)).backward()

    sent = Pair(PartlyNarrow, bucket_cap_mb=25).check(step, steps=12)
    assert any(sent) == (not all(sent)) == (dist.get_world_size() == 2)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@case()
def checkpoints_and_frozen_parameters() -> None:
    def make() -> nn.Module:
        net = Checkpointed()
        net.second.weight.requires_grad_(False)
        return net

    Pair(make).check(forward_backward)


@case()
def anomalies_are_seen() -> None:
    pair = Pair()
    pair.check(forward_backward, steps=6)
    with sent_as_computed(), torch.autograd.detect_anomaly(check_nan=True):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(pair.narrow(data(0))) * float("nan")
        try:
            loss.backward()
        except RuntimeError as error:
            assert "nan" in str(error)
        else:
            raise AssertionError("no anomaly was seen")


@case("cuda")
def half_with_a_grad_scaler() -> None:
    def step(model: Any, number: int) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = loss_of(model(data(number)))
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad /= 1024

    Pair().check(step)


class Wide(nn.Module):
    """Gradients of several blocks that fill no whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 514), nn.Tanh(), nn.Linear(514, 320), nn.LayerNorm(320))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@case()
def many_blocks() -> None:
    assert all(Pair(Wide, bucket_cap_mb=25).check(forward_backward))
