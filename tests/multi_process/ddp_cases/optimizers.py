"""What stands between a backward and the next forward: clipping, scaling, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    case,
    check_close,
    check_gradients,
    check_in_graph,
    check_same_on_all_ranks,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
)


@case()
def clipping_and_adamw() -> None:
    stock, compiled = pair()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (stock, compiled)]
    for step in range(3):
        for model, optimizer in zip((stock, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
        # AdamW divides by the root of squares: rounding of tiny gradients shows in full.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@case()
def clipping_sees_reduced_gradients() -> None:
    """Norms and clipped gradients are stock DDP's, and the same on all ranks."""
    norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    stock, compiled = pair(backend="aot_eager")

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms[model is compiled].append(norm)

    check_steps(stock, compiled, run, exact=False)
    for expected, found in zip(*norms, strict=True):
        check_close(found, expected, "norm")
        check_same_on_all_ranks(found, "norm")
    check_in_graph(compiled)


@case()
def scaled_gradients_with_an_overflow() -> None:
    """Rank 1's gradients overflow in the second step: every rank skips it, and halves the scale."""
    stock, compiled = pair(backend="aot_eager")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (stock, compiled)]
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=1024.0) for _ in range(2)]
    for step in range(4):
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        for model, optimizer, scaler in zip((stock, compiled), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(data(step))) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (1024 if step < 1 else 512)
        for (name, expected), found in zip(stock.named_parameters(), compiled.parameters(), strict=True):
            check_close(found, expected, name)
            check_same_on_all_ranks(found, name)
    check_in_graph(compiled)


@case()
def autocast() -> None:
    def run(model: Any, step: int) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(model(data(step)))
        loss.backward()

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run, exact=False)
    check_in_graph(compiled)


@case()
def gradients_set_to_none_or_to_zero_by_the_program() -> None:
    stock, compiled = pair(backend="aot_eager")
    for step in range(4):
        for model in (stock, compiled):
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is not None and (number + step) % 3 == 0:
                    parameter.grad = None
                elif parameter.grad is not None and (number + step) % 3 == 1:
                    parameter.grad.mul_(0.5)
            loss_of(model(data(step))).backward()
        check_gradients(stock, compiled, exact=True)
    check_in_graph(compiled)


@case()
def gradients_changed_through_their_data() -> None:
    """As older programs clip and zero them."""
    stock, compiled = pair(backend="aot_eager")

    def run(model: Any, step: int) -> None:
        loss_of(model(data(step))).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)

    check_steps(stock, compiled, run, steps=4)
    for step in range(3):
        for model in (stock, compiled):
            for parameter in model.parameters():
                parameter.grad.detach_()
                parameter.grad.zero_()
            run(model, step)
        check_gradients(stock, compiled, exact=True)
    check_in_graph(compiled)


@case()
def gradients_that_the_program_keeps() -> None:
    """As it does to combine those of several losses: they are its own when no parameter has them any more."""
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda gradient: gradient,
        torch.flatten,
        torch.detach,
    )

    def run(model: Any, step: int) -> None:
        kept = []
        for part in range(2):
            loss_of(model(data(2 * step + part))).backward()
            kept.append([views[step % 3](parameter.grad) for parameter in model.parameters()])
            for parameter in model.parameters():
                parameter.grad = None
        for parameter, first, second in zip(model.parameters(), *kept, strict=True):
            parameter.grad = (first - 0.5 * second).view_as(parameter)

    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, run, steps=6)
    places = inspect_ddp(compiled).buckets.buffers.flat
    addresses = [flat.data_ptr() for flat in places]
    # What nobody keeps stays where it is, as what is kept by itself.
    for step in (0, 3, 6):
        for model in (stock, compiled):
            plain_step(model, step) if step else run(model, step)
        check_gradients(stock, compiled, exact=True)
    assert [flat.data_ptr() for flat in places] == addresses
    check_in_graph(compiled)


@case()
def views_of_gradients_that_are_set_to_zero() -> None:
    """They see what is accumulated, as the gradients stay the tensors that they are, also when buckets are planned
    anew; so do references to them."""
    for view in (torch.flatten, lambda gradient: gradient):
        stock, compiled = pair(backend="aot_eager")
        views: list[list[torch.Tensor]] = []
        for model in (stock, compiled):
            plain_step(model, 0)
            views.append([view(parameter.grad) for parameter in model.parameters()])
        for step in range(1, 8):
            for model in (stock, compiled):
                model.zero_grad(set_to_none=False)
                plain_step(model, step)
            check_gradients(stock, compiled, exact=True)
            for expected, found in zip(*views, strict=True):
                check_close(found, expected)
        check_in_graph(compiled)


@case()
def parameters_replaced_in_place_by_an_average() -> None:
    """As weight averaging does between epochs."""
    stock, compiled = pair(backend="aot_eager")
    check_steps(stock, compiled, steps=2)
    for model in (stock, compiled):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter * 0.5)
    check_steps(stock, compiled, steps=2)
    check_in_graph(compiled)
