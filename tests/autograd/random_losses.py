"""Random losses over a vocabulary, for passes that rewrite what is computed row by row from a matrix product."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, TIME, WIDTH, VOCABULARY = 3, 8, 2, 40
ROWS = BATCH * TIME

Rows = Callable[[Tensor, Tensor], Tensor]


def random_loss(seed: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
    """A function of ``x [ROWS, WIDTH]``, a weight ``[VOCABULARY, WIDTH]``, a bias and labels ``[ROWS]``."""
    draw = random.Random(seed)
    shape = draw.choice([(ROWS,), (BATCH, TIME), (1, BATCH, TIME)])
    steps = [_random_step(draw, len(shape)) for _ in range(draw.randrange(4))]
    cut = (
        draw.choice([None, None, slice(None, -1), slice(1, None), slice(1, 7, 2)]) if len(shape) > 1 else None
    )
    loss, with_bias = draw.choice(LOSSES), draw.random() < 0.5
    factor = draw.choice([None, 0.25, 3.0])

    def run(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Any:
        values = F.linear(x.view(*shape, WIDTH), weight, bias if with_bias else None)
        labels = labels.view(shape)
        for step in steps:
            values = step(values, labels)
        if cut is not None:
            values, labels = values[..., cut, :], labels[..., cut]
        result = loss(values.reshape(-1, VOCABULARY), labels.reshape(-1))
        return result if factor is None else result * factor

    return run


def _random_step(draw: random.Random, dims: int) -> Rows:
    """Something that is done to logits: ``[*dims, VOCABULARY]`` to the same, with labels of these dims."""
    kind, number = draw.randrange(12), draw.uniform(0.5, 2)
    dim = draw.randrange(dims)
    steps: list[Rows] = [
        lambda v, y: v * number,
        lambda v, y: number * torch.tanh(v / number),
        lambda v, y: v - v.mean(-1, keepdim=True),
        lambda v, y: torch.where(v > number, v, v * 0.1),
        lambda v, y: v + torch.arange(VOCABULARY, device=v.device) * 0.01,
        lambda v, y: v + (y.unsqueeze(-1) == torch.arange(VOCABULARY, device=v.device)) * number,
        lambda v, y: v.masked_fill((y % 5 == 0).unsqueeze(-1), number),
        lambda v, y: v + y.unsqueeze(-1).amax(dim, keepdim=True) * 0.01,
        lambda v, y: F.layer_norm(v, (VOCABULARY,)),
        lambda v, y: v.flip(-1) + v[..., :1],
        lambda v, y: torch.cat([v[..., 3:], v[..., :3] * number], -1),
        lambda v, y: v.clamp(-number, number) + v.transpose(0, -1).transpose(0, -1),
    ]
    return steps[kind]


def _each(v: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(v, y, reduction="none", ignore_index=1)


LOSSES: list[Rows] = [
    lambda v, y: F.cross_entropy(v, y),
    lambda v, y: F.cross_entropy(v, y, ignore_index=1, reduction="sum"),
    lambda v, y: F.cross_entropy(v, y, ignore_index=1, label_smoothing=0.3),
    lambda v, y: F.cross_entropy(v, y, torch.ones(VOCABULARY, dtype=v.dtype) * 0.5, label_smoothing=0.1),
    lambda v, y: (_each(v, y) * (y % 3)).sum() / (y % 3).sum(),
    lambda v, y: (_each(v, y) * torch.sigmoid(_each(v, y))).mean(),
    lambda v, y: F.nll_loss(F.log_softmax(v, -1), y),
    lambda v, y: F.cross_entropy(v, y) + 0.01 * v.logsumexp(-1).square().mean(),
    lambda v, y: -(torch.log_softmax(v, -1) * F.softmax(v.detach() * 2, -1)).sum(-1).mean(),
    lambda v, y: (
        F.cross_entropy(v, y) + 0.1 * F.binary_cross_entropy_with_logits(v[:, 0], (y % 2).to(v.dtype))
    ),
    lambda v, y: F.multi_margin_loss(v, y),
    lambda v, y: v.square().sum(-1).add(1).log().sum(),
    lambda v, y: F.cross_entropy(v, y).exp(),
    lambda v, y: F.cross_entropy(v, y).square(),
]
