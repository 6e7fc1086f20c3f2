"""Batches of other sizes, also on one rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from gradsplit.distributed import inspect_ddp
from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_gradients,
    check_in_graph,
    data,
    is_in_graph,
    pair,
    train,
)


@case()
def short_batch_on_one_rank() -> None:
    """Whose graph has the operators of the one before, also where a dropout drops nothing."""

    class Undropped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.0, self.training)

    stock, compiled = pair(Undropped)
    train((stock, compiled), steps=1)
    rows = 6 if dist.get_rank() == 0 else 3
    for model in (stock, compiled):
        model.zero_grad()
        model(data(8, rows)).square().mean().backward()
    check_gradients(stock, compiled)


@case()
def sizes_that_differ_between_steps() -> None:
    """The second size opens the batch; the buckets of the first graph serve what is compiled for all sizes."""
    stock, compiled = pair()
    for step, rows in enumerate((6, 4, 5, 4, 6 if dist.get_rank() == 0 else 3)):
        for model in (stock, compiled):
            model.zero_grad()
            model(data(step, rows)).square().mean().backward()
        check_gradients(stock, compiled)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled)._in_graph._synchronised.entries) == 2


@case()
def one_program_of_open_sizes_fills_several_buckets() -> None:
    stock, compiled = pair(backend="aot_eager", bucket_cap_mb=0.007)
    for step, rows in enumerate((6, 4, 5, 3)):
        for model in (stock, compiled):
            model.zero_grad()
            model(data(step, rows)).square().mean().backward()
        check_gradients(stock, compiled)
    runner = inspect_ddp(compiled)
    assert is_in_graph(compiled) and len(runner.plan.buckets) > 1
    assert len(runner.graphs) == 2


@case()
def sizes_that_are_compiled_in_the_midst_of_a_step() -> None:
    """By another process while torch's kernels run the segments, or by a rank for which the others wait."""
    for elsewhere in (True, False):
        stock, compiled = pair(options={"compile_elsewhere": elsewhere}, bucket_cap_mb=0.007)
        for step, rows in enumerate((6, 4, 5, 3 + dist.get_rank(), 5, 3 + dist.get_rank())):
            if step == 4:
                gradsplit.wait_for_compilations()
                dist.barrier()
            for model in (stock, compiled):
                model.zero_grad()
                model(data(step, rows)).square().mean().backward()
            check_gradients(stock, compiled)
        check_in_graph(compiled)
