"""Activation checkpoints: inside of a bucket, across buckets, round graph breaks; both kinds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gradsplit
from tests.multi_process.ddp_harness import (
    case,
    check_gradients,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Checkpointed(nn.Module):
    """Blocks, each of them (or two at a time) in a checkpoint."""

    def __init__(self, use_reentrant: bool, together: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.checkpoint = functools.partial(checkpoint, use_reentrant=use_reentrant)
        self.together, self.breaks = together, breaks

    def pair(self, first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        if self.breaks:
            gradsplit.graph_break()
        return second(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.together:
            for first, second in ((self.blocks[0], self.blocks[1]), (self.blocks[2], self.blocks[3])):
                x = self.checkpoint(self.pair, first, second, x)
            return x
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return x


def run(model: Any, step: int) -> None:
    # A reentrant checkpoint differentiates nothing unless an input of it needs a gradient.
    loss_of(model(data(step).requires_grad_())).backward()


@case()
def one_checkpoint_a_block() -> None:
    for use_reentrant in (False, True):
        stock, compiled = pair(functools.partial(Checkpointed, use_reentrant), backend="aot_eager")
        check_steps(stock, compiled, run)
        check_in_graph(compiled)


@case()
def checkpoints_across_buckets() -> None:
    for use_reentrant in (False, True):
        stock, compiled = pair(
            functools.partial(Checkpointed, use_reentrant, together=True),
            backend="aot_eager",
            bucket_cap_mb=0.001,
        )
        check_steps(stock, compiled, run)
        check_in_graph(compiled)


@case()
def graph_breaks_in_checkpoints() -> None:
    for use_reentrant in (False, True):
        stock, compiled = pair(
            functools.partial(Checkpointed, use_reentrant, together=True, breaks=True),
            backend="aot_eager",
        )
        check_steps(stock, compiled, run)
        check_in_graph(compiled)


@case()
def a_sequence_of_checkpoints() -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    stock, compiled = pair(Sequential, backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case()
def a_checkpoint_round_the_ddp_module() -> None:
    def run(model: Any, step: int) -> None:
        loss_of(checkpoint(model, data(step).requires_grad_(), use_reentrant=False)).backward()

    stock, compiled = pair(backend="aot_eager", broadcast_buffers=False)
    check_steps(stock, compiled, run)


@case()
def hooks_of_parameters_see_what_is_accumulated() -> None:
    """Also where the engine learns of a parameter only when a reentrant checkpoint runs its forward again."""
    for use_reentrant in (False, True):
        stock, compiled = pair(
            functools.partial(Checkpointed, use_reentrant, together=True, breaks=True),
            backend="aot_eager",
        )
        for model in (stock, compiled):
            model.module.blocks[0].up.weight.register_post_accumulate_grad_hook(double)
        for step in range(3):
            for model in (stock, compiled):
                run(model, step)
            check_gradients(stock, compiled)
        check_in_graph(compiled)


def double(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(2)
