"""Hooks of parameters, of modules and of the reducer's communication."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.multi_process.ddp_harness import case, check_in_graph, check_reducer, pair, train


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
def hooks_of_the_wrapped_module_keep_the_reducer() -> None:
    stock, compiled = pair()
    for model in (stock, compiled):
        model.module.register_forward_hook(lambda module, args, result: result * 2)
    train((stock, compiled))
    check_reducer(compiled, "wrapped module")


@case()
def one_rank_that_needs_the_reducer_takes_all() -> None:
    stock, compiled = pair()
    if dist.get_rank() == 1:
        compiled.register_forward_hook(lambda module, args, output: None)
    train((stock, compiled))
    check_reducer(compiled, "rank 1")
