"""Models whose parameters and activations are spread over two ranks as DTensors, compiled and not.

``fork_ranks(["-m", "tests.multi_process.tensor_parallel_cases", "cpu"])``. Each case is one graph; outputs, gradients
of inputs and parameters are compared, and the parameters after some steps of an optimizer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradsplit

_BACKENDS = ("eager", "aot_eager", "triton")


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Two heads, one for each rank."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of keys changes nothing: its gradient is rounding, which AdamW would blow up.
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def _block(mesh: Any) -> nn.Module:
    return parallelize_module(
        Block().to(mesh.device_type), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def _sequences(mesh: Any) -> nn.Module:
    """Activations between blocks are spread along the sequence."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block().to(mesh.device_type), mesh, plan)


def _attention(mesh: Any) -> nn.Module:
    layers = {name: ColwiseParallel() for name in ("q", "k", "v")}
    return parallelize_module(Attention().to(mesh.device_type), mesh, {**layers, "out": RowwiseParallel()})


class _InOneGraph(nn.Module):
    """Goes from plain tensors to DTensors and back, with placements of its own."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(
            DTensor.from_local(
                torch.randn(4, 8, device=mesh.device_type) * 0.1, mesh, [Shard(0)], run_check=False
            ).detach()
        )

    def forward(self, x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        y = nn.functional.gelu(spread @ self.weight.t())
        if y.placements[0].is_shard():
            y = y * self.mesh.size()
        summed = y.sum(-1)
        assert summed.placements == (Partial(),)
        return summed.redistribute(placements=[Replicate()]).to_local() + y.full_tensor().mean()


_MODELS: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...]]] = {
    "columns and rows": (_block, (2, 3, 8)),
    "sequences": (_sequences, (2, 4, 8)),
    "attention": (_attention, (2, 4, 8)),
    "in one graph": (_InOneGraph, (3, 8)),
}


def _run(call: Callable[[Tensor], Tensor], model: nn.Module, size: tuple[int, ...]) -> list[Tensor]:
    # Those of all parameters at once take no DTensors beside others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step = gradsplit.compile(optimizer.step) if call is not model else optimizer.step
    seen: list[Tensor] = []
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(*size, device=next(model.parameters()).device, requires_grad=True)
        y = call(x)
        (y * y).mean().backward()
        seen += [y, x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]
        step()
        optimizer.zero_grad()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(device: str) -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    if device != "cpu":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (2,))
    for name, (make, size) in _MODELS.items():
        for backend in _BACKENDS:
            gradsplit.reset()
            found = []
            for compiles in (False, True):
                torch.manual_seed(dist.get_rank() if make is _InOneGraph else 0)
                model = make(mesh)
                call = gradsplit.compile(model, backend=backend, fullgraph=True) if compiles else model
                found.append(_run(call, model, size))
            for mine, theirs in zip(*found, strict=True):
                assert isinstance(mine, DTensor) == isinstance(theirs, DTensor)
                if isinstance(mine, DTensor) and isinstance(theirs, DTensor):
                    assert mine.placements == theirs.placements
                torch.testing.assert_close(_local(mine) * 1, _local(theirs) * 1)
            print(f"{name} with {backend}: alike", flush=True)
    _gradients_in_another_place(mesh)
    dist.barrier(device_ids=None if device == "cpu" else [rank])
    dist.destroy_process_group()


def _gradients_in_another_place(mesh: Any) -> None:
    """A result that is spread gets a gradient that is not, and one whose collective nobody has waited for."""
    local = torch.randn(2, 3, device=mesh.device_type)
    linear = nn.Linear(3, 4).to(mesh.device_type)
    layer = parallelize_module(linear, mesh, ColwiseParallel(output_layouts=Replicate()))
    for backend in _BACKENDS:
        compiled = gradsplit.compile(lambda d: (d * 2).sin(), backend=backend, fullgraph=True)
        before = gradsplit.compile(lambda x: x.cos() * 3, backend=backend, fullgraph=True)
        found = []
        for spread, plain in ((compiled, before), (lambda d: (d * 2).sin(), lambda x: x.cos() * 3)):
            d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).detach().requires_grad_()
            whole = spread(d).redistribute(placements=[Replicate()])
            (whole * whole).sum().backward()
            assert d.grad is not None
            x = local.clone().requires_grad_()
            layer(plain(x)).sum().backward()
            assert x.grad is not None
            found.append((_local(d.grad) * 1, x.grad * 1))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs)
        print(f"gradients from elsewhere with {backend}: alike", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
