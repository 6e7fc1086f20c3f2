"""A small model with most of what is hard to cut: an embedding that is read at both ends, a value that skips a stage,
dropout, running statistics, and an argument that only the end reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = F.dropout(torch.relu(block(hidden + self.table.cos())), 0.2, self.training)
        return {"loss": F.cross_entropy(self.norm(hidden + first) @ self.embedding.weight.t(), labels)}


def call() -> tuple[Tensor, Tensor]:
    """One microbatch."""
    return torch.arange(6), torch.arange(6) + 3


class Chain(nn.Module):
    """What goes over NCCL: nothing skips a stage, and no weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = F.dropout(torch.relu(block(hidden)), 0.2, self.training)
        return {"loss": F.cross_entropy(self.head(self.norm(hidden)), labels)}


def chain() -> tuple[nn.Module, dict[str, Tensor]]:
    """As ``tied``."""
    ids, labels = call()
    return Chain(), {"ids": ids, "labels": labels}


def tied() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and a call by name."""
    ids, labels = call()
    return Tied(), {"ids": ids, "labels": labels}
