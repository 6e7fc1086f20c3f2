"""Ranks with different numbers of batches: ``join()``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.multi_process.ddp_harness import (
    case,
    check_close,
    check_in_graph,
    check_reducer,
    check_same_on_all_ranks,
    check_steps,
    data,
    gradients_are_exact,
    loss_of,
    pair,
)


@case()
def uneven_inputs() -> None:
    """Rank r has 2 + r batches; ranks without any take part in the others' reductions, which are the reducer's.

    Stock DDP never leaves the state that a ``join()`` put it in, so the reducer is kept from then on.
    """
    stock, compiled = pair(backend="aot_eager")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (stock, compiled)]
    check_steps(stock, compiled)
    check_in_graph(compiled)
    for _ in range(2):
        for model, optimizer in zip((stock, compiled), optimizers, strict=True):
            with model.join():
                for step in range(2 + dist.get_rank()):
                    optimizer.zero_grad()
                    loss_of(model(data(step))).backward()
                    optimizer.step()
        for (name, expected), found in zip(stock.named_parameters(), compiled.parameters(), strict=True):
            check_close(found, expected, name, exact=gradients_are_exact())
            check_same_on_all_ranks(found, name)
        check_steps(stock, compiled)
    check_reducer(compiled, "join() context")
