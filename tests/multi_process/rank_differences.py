"""Ranks whose forwards differ, beside stock DDP: kinds of difference, kinds that cannot be averaged, and random pairs.

``python -m gradsplit.launch --nproc-per-node 2 -m tests.multi_process.rank_differences FOLDER`` runs all kinds, as
``test_rank_differences.py`` does, and writes what became of each, a file for each rank;
``... -m tests.multi_process.rank_differences pairs COUNT [SEED]`` runs so many random pairs of forwards.
``DDP_CASES_DEVICE=cuda`` runs them over NCCL.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit import CompileError
from gradsplit.distributed import DDPOptions, compile_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    check_buffers,
    check_close,
    check_gradients,
    check_in_graph,
    start_process_group,
)

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Behind these a plan has been chosen from measurements.
STEPS = 7
SECONDS = 30
WIDTH = 8

Step = Callable[[Any, int], Tensor]
KINDS: dict[str, Callable[[], None]] = {}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {}
# A rank queues its collectives for NCCL and goes on; it learns of the other in a later step.
NOT_WAITED_FOR = {("cuda", "a_dtype_that_changes_on_one_rank")}


@gradsplit.disable
def in_plain_python(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sin()


class Block(nn.Module):
    """A layer that a rank may run in its own way."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else None
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.last_mean: Any = None

    def forward(self, x: Tensor, style: str) -> Tensor:
        if style == "skipped" or (style == "dropped at random" and random.random() < 0.5):
            return x
        if style == "printed":
            print("statistics")
        if style == "statistic":
            self.last_mean = x.detach().mean()
        if style == "number" and x.abs().sum().item() > 1.0:
            x = x * 0.5
        if style == "scaled":
            return x * self.scale
        if style == "frozen":
            return x + self.layer(x).detach()
        if style == "normalised" and self.norm is not None:
            return self.norm(self.layer(x))
        if style == "checkpointed":
            return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]
        if style == "in plain Python":
            return in_plain_python(self.layer, x)
        if style == "in other bits":
            return nn.functional.linear(x.half().double(), self.layer.weight.double()).to(x.dtype)
        if style == "handles an error":
            try:
                return self.layer(x[:, 1:])
            except RuntimeError:
                return x.cos()
        if style == "weight decay":
            return self.layer(x) * self.layer.weight.square().mean()
        x = torch.tanh(self.layer(x))
        if style == "breaks":
            gradsplit.graph_break()
        if style == "twice":
            x = self.layer(x)
        return x


STYLES = (
    "plain", "skipped", "dropped at random", "printed", "statistic", "number", "scaled", "frozen", "normalised",
    "checkpointed", "in plain Python", "in other bits", "handles an error", "weight decay", "breaks", "twice",
)  # fmt: skip


class Varied(nn.Module):
    """Blocks, each in the style that it is called with, in an order that it is called with."""

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(has_norm) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        styles: Sequence[str] = ("plain",) * 3,
        is_reversed: bool = False,
        mask: Tensor | None = None,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        if not x.is_floating_point():
            x = self.first.weight[x]
        x = self.first(x.to(self.first.weight.dtype))
        for other in more:
            x = x + other
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        blocks = list(zip(self.blocks, styles, strict=True))
        for block, style in reversed(blocks) if is_reversed else blocks:
            x = block(x, style)
        return self.last(x)


def batch(step: int, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE)


def pair(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """Stock DDP, which looks for unused parameters, and compiled DDP, which need not."""
    found = []
    for options in ({"find_unused_parameters": True}, {}):
        torch.manual_seed(7)
        found.append(DistributedDataParallel(make().to(DEVICE, dtype), bucket_cap_mb=0.0005, **options))
    stock, compiled = found
    return stock, gradsplit.compile(compiled, backend="aot_eager")


def check(
    run: Step,
    make: Callable[[], nn.Module] = Varied,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
) -> None:
    """The same steps on both; gradients are compared after each, parameters and buffers at the end."""
    models = pair(make, dtype)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1) for model in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 4)
            random.seed(10 * step + RANK)
            with redirect_stdout(StringIO()):
                run(model, step).square().mean().backward()
        check_gradients(*models)
        for optimizer in optimizers:
            optimizer.step()
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        check_close(found, expected, name)
    check_buffers(*models)
    check_in_graph(models[1])


def kind(function: Callable[[], None]) -> None:
    KINDS[function.__name__] = function


def styled(name: str, *styles: Sequence[str], **given: Any) -> None:
    """A kind: each rank runs the blocks in styles of its own, which move on by a block in later steps."""

    def run(model: Any, step: int) -> Tensor:
        mine = styles[RANK % len(styles)]
        shift = step % 3 if step > 4 else 0
        return model(batch(step), (*mine[shift:], *mine[:shift]))  # type: ignore[no-any-return]

    KINDS[name] = lambda: check(run, **given)


PLAIN = ("plain", "plain", "plain")
styled("a_rank_prints", ("printed", "plain", "printed"), PLAIN)
styled("a_rank_keeps_a_statistic", ("statistic", "plain", "plain"), PLAIN)
styled("a_rank_reads_a_number", ("number", "plain", "number"), PLAIN)
styled("layers_are_dropped_at_random", ("dropped at random",) * 3)
styled(
    "a_rank_breaks_the_graph_elsewhere", ("breaks", "plain", "plain"), ("plain", "breaks", "in plain Python")
)
styled("a_rank_leaves_a_layer_out", PLAIN, ("skipped", "plain", "plain"))
styled("ranks_leave_out_the_same_and_others", ("skipped", "scaled", "plain"), ("skipped", "frozen", "scaled"))
styled("a_rank_detaches_after_a_break", ("scaled", "scaled", "plain"), ("number", "frozen", "plain"))
styled("a_rank_uses_a_weight_twice", PLAIN, ("twice", "weight decay", "plain"))
styled("a_rank_checkpoints", ("checkpointed", "plain", "plain"), PLAIN)
styled("a_rank_computes_in_other_bits", PLAIN, ("in other bits", "plain", "plain"))
styled("a_rank_handles_an_error", PLAIN, ("handles an error", "plain", "plain"))
styled(
    "a_rank_normalises",
    ("normalised", "plain", "plain"),
    ("plain", "normalised", "skipped"),
    make=lambda: Varied(has_norm=True),
)


@kind
def a_mask_is_none() -> None:
    mask = torch.arange(WIDTH, device=DEVICE) % 3 == 0
    check(lambda model, step: model(batch(step), mask=mask if (RANK + step // 3) % 2 else None))


@kind
def lists_of_other_lengths() -> None:
    check(lambda model, step: model(batch(step), more=[batch(step + 1)] * (RANK + step % 2)))


@kind
def inputs_of_other_dtypes_and_sizes() -> None:
    def run(model: Any, step: int) -> Tensor:
        dtype = (torch.float64, torch.float32, torch.int64)[(RANK + step) % 3]
        given = (
            torch.arange(4 + step, device=DEVICE) % WIDTH
            if dtype is torch.int64
            else batch(step, 3 + RANK).to(dtype)
        )
        return model(given)  # type: ignore[no-any-return]

    check(run)


@kind
def layers_in_another_order() -> None:
    check(lambda model, step: model(batch(step), is_reversed=(RANK + step // 3) % 2 == 1))


@kind
def all_of_one_rank_in_plain_python() -> None:
    class Plain(Varied):
        forward = gradsplit.disable(Varied.forward) if RANK else Varied.forward

    check(lambda model, step: model(batch(step)), Plain)


@kind
def parameters_frozen_on_one_rank() -> None:
    def run(model: Any, step: int) -> Tensor:
        for parameter in model.module.blocks[step % 3].parameters():
            parameter.requires_grad_(RANK == 0 or step in (1, 3))
        return model(batch(step))  # type: ignore[no-any-return]

    check(run)


@kind
def hooks_of_one_rank_that_come_after_the_forward() -> None:
    def run(model: Any, step: int) -> Tensor:
        result = model(batch(step))
        if step % 2 == RANK:
            weight = model.module.blocks[1].layer.weight
            handle = weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            result.register_hook(lambda gradient: None)
            weight.register_post_accumulate_grad_hook(lambda _: handle.remove())
        return result  # type: ignore[no-any-return]

    check(run, steps=4)


@kind
def other_counts_of_accumulated_batches() -> None:
    def run(model: Any, step: int) -> Tensor:
        with model.no_sync():
            for part in range((RANK + step) % 3):
                model(batch(step + 20 * part), ("skipped", "plain", "plain")).square().mean().backward()
        return model(batch(step), ("plain", "skipped", "plain"))  # type: ignore[no-any-return]

    check(run)


@kind
def other_counts_of_forwards_of_a_backward() -> None:
    def run(model: Any, step: int) -> Tensor:
        if RANK == 0:
            model(batch(step + 30))
            with torch.no_grad():
                model(batch(step + 50))
        return sum(
            (model(batch(step + part)) for part in range(1 + (RANK + step) % 2)),
            torch.zeros((), device=DEVICE),
        )

    check(run)


@kind
def a_rank_without_any_gradient() -> None:
    """Stock DDP would wait for it; here it contributes zeros."""

    class Skips(Varied):
        def forward(self, x: Tensor, is_skipped: bool) -> Tensor:  # type: ignore[override]
            return x[:, :4] * 2 if is_skipped else super().forward(x)

    stock, compiled = pair(Skips)
    for step in range(4):
        for model in (stock, compiled):
            model.zero_grad()
        # The mean with zeros.
        with stock.no_sync():
            (stock(batch(step), False).square().mean() * (RANK == 0)).backward()
        for parameter in stock.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD_SIZE
        compiled(batch(step).requires_grad_(), RANK != 0).square().mean().backward()
        check_gradients(stock, compiled)


@kind
def a_rank_leaves_out_a_layer_of_two_modules() -> None:
    """Its bucket is started at the end of the backward there, and in its midst elsewhere."""
    first, second = pair(Varied), pair(Varied)
    for step in range(STEPS):
        for encoder, decoder in zip(first, second, strict=True):
            encoder.zero_grad()
            decoder.zero_grad()
            hidden = encoder(batch(step), PLAIN if RANK else ("skipped", "plain", "plain"))
            result = decoder(hidden.repeat(1, 2), ("plain", "skipped", "plain") if RANK else PLAIN)
            result.square().mean().backward()
        check_gradients(*first)
        check_gradients(*second)


@kind
def autocast_on_one_rank() -> None:
    def run(model: Any, step: int) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16) if RANK else nullcontext():
            return model(batch(step)).float()  # type: ignore[no-any-return]

    check(run, steps=3, dtype=torch.float32)


def refused(says: str) -> Callable[[Callable[[], Any]], None]:
    def register(function: Callable[[], Any]) -> None:
        REFUSED[function.__name__] = function, says

    return register


def plain_ddp(make: Callable[[], nn.Module] = Varied, **ddp_options: Any) -> DistributedDataParallel:
    torch.manual_seed(7)
    return DistributedDataParallel(make().to(DEVICE), **ddp_options)


def compiled(ddp: DistributedDataParallel, **options: Any) -> Any:
    return compile_ddp(ddp, DDPOptions(**options), backend="aot_eager")


WEIGHT = "blocks.1.layer.weight"


@refused(
    f"the parameter first.weight is float64[8, 8] on {DEVICE} on rank 1 and float32[8, 8] on {DEVICE} on rank 0"
)
def parameters_of_another_dtype() -> Any:
    return compiled(plain_ddp().to(torch.float64 if RANK == 1 else torch.float32))


@refused(
    f"the parameter {WEIGHT} is bfloat16[8, 8] on {DEVICE} on rank 1 and float32[8, 8] on {DEVICE} on rank 0"
)
def one_parameter_of_another_dtype() -> Any:
    ddp = plain_ddp()
    if RANK == 1:
        weight = ddp.module.get_parameter(WEIGHT)
        weight.data = weight.data.bfloat16()
    return compiled(ddp)


@refused(
    f"the parameter {WEIGHT} is float32[8, 4] on {DEVICE} on rank 1 and float32[8, 8] on {DEVICE} on rank 0"
)
def a_parameter_of_another_shape() -> Any:
    ddp = plain_ddp()
    if RANK == 1:
        weight = ddp.module.get_parameter(WEIGHT)
        weight.data = weight.data[:, :4].contiguous()
    return compiled(ddp)


@refused(f"the parameter last.weight is not there on rank 1 and float32[4, 8] on {DEVICE} on rank 0")
def other_parameters() -> Any:
    class Renamed(Varied):
        last = property(lambda self: self.head)

        def __init__(self) -> None:
            super().__init__()
            parts = self._modules.items()
            self._modules = {"head" if name == "last" else name: part for name, part in parts}

    return compiled(plain_ddp(Renamed if RANK == 1 else Varied))


@refused(
    f"the buffer blocks.0.norm.running_mean is float32[3] on {DEVICE} on rank 1 and float32[8] on {DEVICE} on rank 0"
)
def a_buffer_of_another_shape() -> Any:
    ddp = plain_ddp(lambda: Varied(has_norm=True))
    if RANK == 1:
        ddp.module.blocks[0].norm.running_mean = torch.zeros(3, device=DEVICE)
    return compiled(ddp)


@refused("static_graph is True on rank 1 and False on rank 0")
def a_static_graph_on_one_rank() -> Any:
    return compiled(plain_ddp(static_graph=RANK == 1))


@refused("gradient_compression is bf16 on rank 1 and None on rank 0")
def gradients_compressed_on_one_rank() -> Any:
    return compiled(plain_ddp(), gradient_compression="bf16" if RANK == 1 else None)


@refused("first.weight was float32[8, 8] on cpu when its gradient was first reduced and is float64")
def a_dtype_that_changes_on_one_rank() -> Any:
    """The last, since the others are in the midst of a backward."""
    model = compiled(plain_ddp())
    for step in range(2):
        model(batch(step)).sum().backward()
    if RANK == 1:
        model.double()
    return model


def outcome_of(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception:
        return traceback.format_exc()
    return ""


def refusal_of(make: Callable[[], Any], says: str) -> str:
    """ "" if every rank is told in time."""
    start_s = time.monotonic()
    try:
        make()(batch(0)).sum().backward()
    except CompileError as error:
        seconds = time.monotonic() - start_s
        return "" if says in str(error) and seconds < SECONDS else f"after {seconds:.0f} s: {error}"
    except Exception:
        return traceback.format_exc()
    return "went on"


def random_pair(seed: int, steps: int = 3) -> None:
    """Each rank runs its blocks in styles of its own, which it may change from step to step."""
    choices = random.Random(f"{seed} on {RANK}")
    plans = []
    for _ in range(steps):
        if not plans or choices.random() < 0.4:
            styles = tuple(choices.choice(STYLES) for _ in range(3))
        plans.append((styles, choices.random() < 0.3, choices.randint(2, 6)))

    def run(model: Any, step: int) -> Tensor:
        styles, is_reversed, rows = plans[step]
        return model(batch(step, rows), styles, is_reversed)  # type: ignore[no-any-return]

    try:
        check(run, lambda: Varied(has_norm=seed % 2 == 0), steps)
    except Exception as error:
        raise AssertionError(f"seed {seed}, rank {RANK}, {plans}: {error}") from error


def run_pairs(count: int, first_seed: int = 0) -> None:
    start_process_group(timeout=timedelta(seconds=60))
    for seed in range(first_seed, first_seed + count):
        random_pair(seed)
        gradsplit.reset()
    print(f"rank {RANK}: {count} pairs are alike", flush=True)
    time.sleep(1)  # see run_ddp_cases.py
    dist.destroy_process_group()


def run_kinds(folder: Path, names: Sequence[str]) -> None:
    start_process_group(timeout=timedelta(seconds=60))
    outcomes, seconds = {}, {}
    for name in names or (*KINDS, *(name for name in REFUSED if (DEVICE, name) not in NOT_WAITED_FOR)):
        start_s = time.monotonic()
        outcomes[name] = outcome_of(KINDS[name]) if name in KINDS else refusal_of(*REFUSED[name])
        seconds[name] = round(time.monotonic() - start_s, 1)
        (folder / f"rank_{RANK}.json").write_text(json.dumps(outcomes))
        if outcomes[name] and name in KINDS:  # the others may be anywhere
            break
    print(f"rank {RANK}: {seconds}", flush=True)
    time.sleep(1)
    os._exit(0)


def main(*arguments: str) -> None:
    logging.disable(logging.WARNING)
    if arguments[0] == "pairs":
        run_pairs(*map(int, arguments[1:]))
    else:
        run_kinds(Path(arguments[0]), arguments[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
