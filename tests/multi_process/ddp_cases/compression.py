"""Gradients that travel in 16 bits, beside stock DDP with the hooks that do the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from gradsplit.distributed.collectives.averaging import WIRE_TYPES
from tests.multi_process.ddp_harness import (
    Net,
    ThreeTypes,
    case,
    check_gradients,
    check_in_graph,
    check_same_on_all_ranks,
    data,
    loss_of,
    stock_ddp,
)

HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def hooked_and_compressed(compression: Any, backend: str = "aot_eager", make: Any = Net) -> tuple[Any, Any]:
    """Stock DDP with the hook, and compiled DDP with the option."""
    stock = stock_ddp(make)
    hook = HOOKS[compression]

    # DDP refuses the one for bfloat16, by its name, where there is no NCCL.
    def compress(group: Any, bucket: Any) -> Any:
        return hook(group, bucket)

    compress.__annotations__.clear()  # DDP looks at those, too
    stock.register_comm_hook(None, compress)
    return stock, compile_ddp(stock_ddp(make), DDPOptions(gradient_compression=compression), backend=backend)


@case()
def bits_are_those_of_stock_ddps_hook() -> None:
    for compression in WIRE_TYPES:
        stock, compiled = hooked_and_compressed(compression)
        for step in range(2):
            for model in (stock, compiled):
                model.zero_grad()
                # Far from the subnormal numbers of 16 bits, where it matters whether one divides before one rounds.
                (1024 * loss_of(model(data(step)))).backward()
            check_gradients(stock, compiled, exact=True)
        check_in_graph(compiled)
        assert len(inspect_ddp(compiled).plan.buckets) > 1
        assert all(parameter.grad.dtype == torch.float32 for parameter in compiled.parameters())


@case()
def generated_kernels_store_what_is_compressed() -> None:
    """Rounding to 16 bits makes a bit of float32 a step of bfloat16 now and then, no more."""
    _, compiled = hooked_and_compressed("bf16", "triton")
    plain = stock_ddp()
    for model in (plain, compiled):
        loss_of(model(data(0))).backward()
    for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
        # Each rank's gradient is rounded, and then their sum.
        bound = 2 * torch.finfo(torch.bfloat16).eps * expected.grad.abs().max()
        assert (found.grad - expected.grad).abs().max() <= bound
        assert torch.equal(found.grad, found.grad.bfloat16().float())
        check_same_on_all_ranks(found.grad, "compressed gradient")


@case()
def accumulated_gradients_are_compressed_with_the_rest() -> None:
    stock, compiled = hooked_and_compressed("bf16")
    for model in (stock, compiled):
        with model.no_sync():
            (64 * loss_of(model(data(1)))).backward()
        (64 * loss_of(model(data(0)))).backward()
    check_gradients(stock, compiled, exact=True)


@case()
def other_types_travel_as_they_are() -> None:
    """Only float32 gradients are made smaller."""
    stock = stock_ddp(ThreeTypes)
    compiled = compile_ddp(
        stock_ddp(ThreeTypes), DDPOptions(gradient_compression="fp16"), backend="aot_eager"
    )
    for model in (stock, compiled):
        loss_of(model(data(0))).backward()
    check_in_graph(compiled)
    for part in ("second", "third"):
        check_gradients(getattr(stock.module, part), getattr(compiled.module, part), exact=True)
    found = compiled.module.first.weight.grad
    assert torch.equal(found, found.half().float())
