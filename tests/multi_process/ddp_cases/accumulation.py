"""Gradients of several backwards, with and without ``no_sync()``, and several forwards before a backward."""

from __future__ import annotations

import torch.distributed as dist

from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    data,
    pair,
)


@case()
def no_sync_accumulates_locally() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model(data(0)).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)


@case()
def first_call_under_no_sync() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
    check_gradients(stock, compiled)
    check_in_graph(compiled)


@case()
def gradients_accumulate_without_zero_grad() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case()
def zero_grad_keeping_tensors() -> None:
    stock, compiled = pair()
    for step in range(3):
        for model in (stock, compiled):
            model.zero_grad(set_to_none=False)
            model(data(step)).square().mean().backward()
        check_gradients(stock, compiled)


@case()
def two_forwards_before_two_backwards() -> None:
    _, compiled = pair()
    reference = Net().to(DEVICE)
    reference.load_state_dict(compiled.module.state_dict())
    losses = [compiled(data(step)).square().mean() for step in range(2)]
    for loss in losses:
        loss.backward()
    for step in range(2):
        reference(data(step)).square().mean().backward()
    for expected, found in zip(reference.parameters(), compiled.parameters(), strict=True):
        mean = expected.grad / dist.get_world_size()
        dist.all_reduce(mean)
        check_close(found.grad, mean)
