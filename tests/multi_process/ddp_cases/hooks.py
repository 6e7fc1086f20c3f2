"""Hooks of parameters, of modules and of the reducer's communication."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    case,
    check_close,
    check_in_graph,
    check_reducer,
    pair,
    train,
)


@case()
def plain_python_on_one_rank() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    check_in_graph(compiled)
    if dist.get_rank() == 1:
        handles = [
            model.module.first.weight.register_hook(lambda grad: grad * 2) for model in (stock, compiled)
        ]
    train((stock, compiled), steps=2)
    if dist.get_rank() == 1:
        for handle in handles:
            handle.remove()
    train((stock, compiled), steps=1)


@case()
def comm_hook_keeps_the_reducer() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    train((stock, compiled))
    check_reducer(compiled, "hook")


@case()
def hooks_of_modules() -> None:
    """On the DDP module, the wrapped module and a part of it; they see what they see in stock DDP."""
    stock, compiled = pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, values in zip((stock, compiled), seen, strict=True):
        for part in (model, model.module, model.module.second):
            part.register_forward_hook(lambda module, args, result: result * 2)
            part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            part.register_full_backward_hook(
                lambda module, inputs, outputs, values=values: values.append(outputs[0].clone())
            )
    train((stock, compiled))
    check_in_graph(compiled)
    assert len(seen[0]) == 9
    for found, expected in zip(seen[1], seen[0], strict=True):
        check_close(found, expected)


def scale_by_rank(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(1 + dist.get_rank())


@case()
def hooks_of_parameters() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.module.first.weight.register_hook(lambda gradient: gradient * 3)
        model.module.third.bias.register_post_accumulate_grad_hook(scale_by_rank)
    train((stock, compiled))
    check_in_graph(compiled)


@case()
def hooks_that_come_and_go() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    handles = [model.module.second.weight.register_hook(torch.neg) for model in (stock, compiled)]
    train((stock, compiled), steps=2)
    for handle in handles:
        handle.remove()
    train((stock, compiled), steps=1)
    assert len(inspect_ddp(compiled).graphs) == 2


@case()
def one_rank_that_needs_the_reducer_takes_all() -> None:
    stock, compiled = pair()
    if dist.get_rank() == 1:
        compiled.find_unused_parameters = True
    train((stock, compiled))
    check_reducer(compiled, "rank 1")
