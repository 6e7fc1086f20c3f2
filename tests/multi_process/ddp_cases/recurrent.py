"""Recurrent networks: hidden states that go on from step to step, and sequences of several lengths in a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.multi_process.ddp_harness import case, check_close, check_in_graph, check_steps, data, pair


class Language(nn.Module):
    """A small model of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        hidden, state = self.recurrent(x, state)
        return self.head(hidden), state


@case()
def hidden_states_that_are_carried_over() -> None:
    stock, compiled = pair(Language, backend="aot_eager")
    states: dict[int, Any] = {}

    def run(model: Any, step: int) -> None:
        state = states.get(id(model))
        result, state = model(data(step, 12).view(3, 4, 16), state and tuple(part.detach() for part in state))
        result.square().mean().backward()
        states[id(model)] = state

    check_steps(stock, compiled, run)
    check_in_graph(compiled)
    for expected, found in zip(states[id(stock)], states[id(compiled)], strict=True):
        check_close(found, expected)


class Packed(nn.Module):
    """Packs sequences by lengths that each rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(16, 12, batch_first=True)
        self.second = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, (last, _) = self.second(self.first(packed)[0])
        return self.head(last[-1]) + pad_packed_sequence(hidden, batch_first=True)[0].mean()


@case()
def packed_sequences() -> None:
    stock, compiled = pair(Packed, backend="aot_eager")

    def run(model: Any, step: int) -> None:
        longest = 4 + (step > dist.get_rank())  # of other sizes first on rank 0 alone
        x = data(step, 3 * longest).view(3, longest, 16)
        model(x, torch.tensor([2, longest, 1 + step])).square().mean().backward()

    check_steps(stock, compiled, run)
    check_in_graph(compiled)
