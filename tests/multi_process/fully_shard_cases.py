"""Models under FSDP2, each trained plain and compiled on every rank; prints one line for each that trains alike.

FSDP frees the weights of a layer behind its forward and gathers them again before its backward, in memory made anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, scaled_dot_product_attention

import gradsplit


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 20, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.heads, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.heads(self.embedding(tokens)).chunk(3, -1)
        # A copy: FSDP warns of results that are views.
        return self.out(scaled_dot_product_attention(query, key, value)).clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def images() -> nn.Module:
    layers = (nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers)


def mixed_sizes() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 129), nn.Tanh(), nn.Linear(129, 1), nn.Linear(1, 7))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def shard_children(model: nn.Module, reshard_after_forward: bool = True) -> None:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=MESH, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=MESH, reshard_after_forward=reshard_after_forward)


def shard_nested(model: nn.Module) -> None:
    for child in model.children():
        fully_shard(child.up, mesh=MESH)
        fully_shard(child, mesh=MESH)
    fully_shard(model, mesh=MESH)


def shard_heads(model: Attention) -> None:
    fully_shard(model.out, mesh=MESH)
    fully_shard(model, mesh=MESH)


def shard_whole(model: nn.Module) -> None:
    fully_shard(model, mesh=MESH)


def features() -> Tensor:
    return torch.randn(4, 8)


def tokens() -> Tensor:
    return torch.randint(0, 20, (4, 6))


Case = tuple[Callable[[], nn.Module], Callable[..., None], Callable[[], Tensor]]

CASES: dict[str, Case] = {
    "mlp": (mlp, shard_children, features),
    "tied": (Tied, shard_whole, tokens),
    "norms": (blocks, shard_children, features),
    "images": (images, shard_children, lambda: torch.randn(4, 3, 8, 8)),
    "attention": (Attention, shard_heads, tokens),
    "nested": (blocks, shard_nested, features),
    "kept": (mlp, partial(shard_children, reshard_after_forward=False), features),
    "mixed_sizes": (mixed_sizes, shard_children, features),
}


def train(model: nn.Module, call: Callable[[Tensor], Tensor], data: Callable[[], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        loss = call(data()).square().mean()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    MESH = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (make, shard, data) in CASES.items():
        torch.manual_seed(0)
        plain = make()
        other = copy.deepcopy(plain)
        shard(plain)
        shard(other)
        expected = train(plain, plain, data)
        actual = train(other, gradsplit.compile(other), data)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        if dist.get_rank() == 0:
            print(name, "trains alike", flush=True)
    dist.destroy_process_group()
