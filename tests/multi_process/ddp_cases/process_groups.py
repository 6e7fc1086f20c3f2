"""Modules over process groups that are not the default one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.multi_process.ddp_harness import (
    DEVICE,
    case,
    check_close,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
    plain_step,
)


@case()
def a_group_with_a_backend_for_each_kind_of_device() -> None:
    group = dist.new_group(backend={"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}[DEVICE])
    stock, compiled = pair(backend="aot_eager", process_group=group)
    check_steps(stock, compiled, steps=7)
    check_in_graph(compiled)


@case()
def groups_of_one_rank() -> None:
    """Ranks go their own ways; then they train a module together, when they are in different numbers of groups."""
    groups = [dist.new_group([rank]) for rank in (*range(dist.get_world_size()), 0)]
    rank = dist.get_rank()
    stock, compiled = pair(backend="aot_eager", process_group=groups[rank])
    for step in range(3 + 4 * rank):
        for model in (stock, compiled):
            model.zero_grad()
            loss_of(model(data(step))).backward()
        for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
            check_close(found.grad, expected.grad)
    check_in_graph(compiled)
    check_steps(*pair(backend="aot_eager"))


@case()
def a_group_that_is_destroyed() -> None:
    """The modules over another group go on."""
    group = dist.new_group()
    over_group, over_all = pair(backend="aot_eager", process_group=group), pair(backend="aot_eager")
    for models in (over_group, over_all):
        check_steps(*models)
    dist.destroy_process_group(group)
    check_steps(*over_all)


@case()
def a_module_that_gets_another_group() -> None:
    """As of ranks that are left when one has gone: here each goes on alone, and then all together."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    stock, compiled = pair(backend="aot_eager")

    def step(model: Any, number: int) -> None:
        if number % 3 == 0:
            model(data(number))  # a forward without a backward
            model._update_process_group([alone, dist.group.WORLD][number % 2])
        plain_step(model, number)

    check_steps(stock, compiled)
    check_steps(stock, compiled, step, steps=3, synchronised=False)
    for model in (stock, compiled):
        model.load_state_dict(pair(backend="aot_eager")[0].state_dict())
        model._update_process_group(dist.group.WORLD)
    check_steps(stock, compiled)
    check_in_graph(compiled)
