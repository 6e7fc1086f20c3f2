"""A loss over a vocabulary that is computed by chunks: the head's gradient is there before the backward begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.multi_process.ddp_harness import case, check_gradients, check_in_graph, check_steps, data, pair

_VOCABULARY, _WIDTH, _ROWS = 50, 16, 24
_OPTIONS = {"chunk_bytes": 7 * _VOCABULARY * 4}


class Model(nn.Module):
    """An embedding, a layer, and a head, which may be the embedding's table; returns the loss for ``[rows, 16]``."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens, labels = ((x[:, k] * 100).long().abs() % _VOCABULARY for k in (0, 1))
        hidden = torch.tanh(self.layer(self.embedding(tokens) + x))
        return F.cross_entropy(self.head(hidden), labels, ignore_index=3)


def tied() -> Model:
    return Model(tied=True)


def _step(model: nn.Module, step: int) -> None:
    (model(data(step, _ROWS)) / 3).backward()


def _check(make: Callable[[], Model], options: dict[str, Any]) -> None:
    stock, compiled = pair(make, options=options)
    check_steps(stock, compiled, _step, exact=False)
    check_in_graph(compiled)


@case()
def separate_head() -> None:
    _check(Model, _OPTIONS)


@case()
def tied_head() -> None:
    _check(tied, _OPTIONS)


@case()
def recorded_as_cuda_graphs() -> None:
    _check(tied, {**_OPTIONS, "triton.cudagraphs": True})


@case()
def several_backwards() -> None:
    stock, compiled = pair(tied, options=_OPTIONS)
    for model in (stock, compiled):
        with model.no_sync():
            _step(model, 1)
        _step(model, 2)
    check_gradients(stock, compiled)
