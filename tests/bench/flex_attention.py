"""Attention with changed scores on a GPU: our kernels beside TorchInductor's, in one table.

    python -m tests.bench.flex_attention [--shape 4,16,4096,64] [--kv-heads 16] [--kinds causal,window,...] [--kernels]

Both sides are one compiled call of ``flex_attention`` each, on the same tensors in one process, and take turns in rows
of calls (``rows.py``). Figures: milliseconds of a call by CUDA events (the median of rows, each the median of its
calls), seconds of the first call, and how far results and gradients of the sides lie apart (the norm of the difference
by that of TorchInductor's, the largest of result and gradients). ``--kernels`` lists the longest kernels of both, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import gradsplit
from tests.bench.rows import Row, rows_in_turn, run_row

_WARM_UP_S = 1.0
_IN_A_ROW = 20
_WINDOW = 512
_DOCUMENTS = 8
_LONGEST = 8

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SIDES: Mapping[str, Callable[[Attend], Attend]] = {
    "inductor": lambda attend: torch.compile(attend, fullgraph=True),
    "gradsplit": lambda attend: gradsplit.compile(attend, fullgraph=True),
}


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    length: int
    elements: int
    kv_heads: int
    dtype: torch.dtype

    def operands(self) -> list[Tensor]:
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return [
            torch.randn(self.batch, count, self.length, self.elements, device="cuda", dtype=self.dtype)
            for count in heads
        ]


def _causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _masked(mask_mod: Callable[..., Any], sizes: Sizes, batch: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, sizes.length, sizes.length, device="cuda")


def _attend(mask: BlockMask | None, score_mod: Callable[..., Any] | None, sizes: Sizes) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(
            query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=sizes.heads != sizes.kv_heads
        )

    return attend


def _window(sizes: Sizes) -> Attend:
    return _attend(_masked(lambda b, h, i, j: (i >= j) & (i - j <= _WINDOW), sizes), None, sizes)


def _documents(sizes: Sizes) -> Attend:
    """Each row of the batch has documents of other lengths, behind one another."""
    torch.manual_seed(1)
    ends = torch.rand(sizes.batch, _DOCUMENTS - 1, device="cuda").mul(sizes.length).sort().values
    places = torch.arange(sizes.length, device="cuda").expand(sizes.batch, -1).float().contiguous()
    numbers = torch.searchsorted(ends, places, right=True).int()
    mask = _masked(lambda b, h, i, j: (numbers[b, i] == numbers[b, j]) & (i >= j), sizes, sizes.batch)
    return _attend(mask, None, sizes)


def _alibi(sizes: Sizes) -> Attend:
    slopes = torch.exp2(-8 * torch.arange(1, sizes.heads + 1, device="cuda") / sizes.heads)
    return _attend(_masked(_causal, sizes), lambda s, b, h, i, j: s + slopes[h] * (j - i), sizes)


KINDS: Mapping[str, Callable[[Sizes], Attend]] = {
    "causal": lambda sizes: _attend(_masked(_causal, sizes), None, sizes),
    "window": _window,
    "documents": _documents,
    "alibi": _alibi,
    "softcap": lambda sizes: _attend(
        _masked(_causal, sizes), lambda s, b, h, i, j: 20 * torch.tanh(s / 20), sizes
    ),
    "whole": lambda sizes: _attend(None, None, sizes),
}


def forward_step(attend: Attend, operands: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [attend(*operands)]  # type: ignore[call-arg]


def training_step(attend: Attend, operands: Sequence[Tensor], arriving: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in operands]
    result = attend(*leaves)  # type: ignore[call-arg]
    result.backward(arriving)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measure(kind: str, sizes: Sizes, rows: int, kernels: bool) -> list[tuple[str, ...]]:
    """A line of the table for the forward, and one for forward and backward."""
    torch._dynamo.reset()
    gradsplit.reset()
    attend, operands = KINDS[kind](sizes), sizes.operands()
    arriving = torch.randn(operands[0].shape, device="cuda", dtype=sizes.dtype)
    lines = []
    steps = {"forward": forward_step, "training": partial(training_step, arriving=arriving)}
    for name, step in steps.items():
        first_s, results = {}, {}
        runs: dict[str, Callable[[], Row]] = {}
        for side, wrap in SIDES.items():
            run: Callable[[], list[Tensor]] = partial(step, wrap(attend), operands)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            results[side] = run()
            torch.cuda.synchronize()
            first_s[side] = time.perf_counter() - begin
            runs[side] = partial(run_row, run, torch.device("cuda"), _IN_A_ROW)
            if kernels:
                _print_kernels(f"{kind} {name} {side}", run)
        apart = max(
            float((mine.float() - theirs.float()).norm() / theirs.float().norm())
            for mine, theirs in zip(results["gradsplit"], results["inductor"], strict=True)
        )
        ms = {
            side: statistics.median(row.step_ms for row in mine)
            for side, mine in rows_in_turn(runs, _WARM_UP_S, rows).items()
        }
        speed = ms["inductor"] / ms["gradsplit"]
        cells = [f"{ms[side]:.3f}" for side in SIDES]
        lines.append(
            (kind, name, *cells, f"{speed:.2f}", *(f"{first_s[side]:.1f}" for side in SIDES), f"{apart:.1e}")
        )
        print(*lines[-1], flush=True)
    return lines


def _print_kernels(title: str, run: Callable[[], object]) -> None:
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    print(title)
    for event in events[:_LONGEST]:
        print(f"  {event.device_time_total / 1e3:8.3f} ms  {event.count:3d}  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="4,16,4096,64", help="batch, heads, length, elements of a row")
    parser.add_argument("--kv-heads", type=int, help="as many as there are of queries, if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kinds", default="causal,window,documents,alibi", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rows", type=int, default=5, help=f"measured ones, of {_IN_A_ROW} calls")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    batch, heads, length, elements = map(int, arguments.shape.split(","))
    sizes = Sizes(
        batch, heads, length, elements, arguments.kv_heads or heads, getattr(torch, arguments.dtype)
    )
    table = Table(
        "attention", "step", "inductor ms", "gradsplit ms", "speed", "inductor s", "gradsplit s", "apart"
    )
    for kind in arguments.kinds.split(","):
        for line in measure(kind, sizes, arguments.rows, arguments.kernels):
            table.add_row(*line)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, sizes)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
