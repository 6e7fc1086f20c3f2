"""A step of AdamW over GPT-2's 148 parameters on a GPU: torch's own kernels, ours and TorchInductor's, in one table.

    python -m tests.bench.optimizer_steps [--layers 12] [--sides foreach,fused,ours,inductor] [--steps 20]

Figures: milliseconds by CUDA events (median after warm-up), milliseconds of the host, kernels a step, seconds of the
first two steps (which make the state and compile for it), and how far the parameters are from those of ``foreach``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import gradsplit

_WIDTH, _VOCABULARY, _CONTEXT = 768, 50257, 1024
_WARM_UP = 5

Step = Callable[[], object]


def shapes(layers: int) -> list[tuple[int, ...]]:
    width = _WIDTH
    block = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
    ]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(_VOCABULARY, width), (_CONTEXT, width), *block * layers, (width,), (width,)]


def parameters(layers: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes(layers)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 0.01
    return made


def make_step(side: str, owned: list[torch.nn.Parameter]) -> Step:
    fused = side == "fused"
    optimizer = torch.optim.AdamW(owned, lr=1e-3, fused=fused, foreach=None if fused else True)
    if side == "ours":
        return gradsplit.compile(optimizer.step)
    return torch.compile(optimizer.step) if side == "inductor" else optimizer.step


def kernels_of(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


def measure(side: str, layers: int, steps: int, expected: list[torch.Tensor]) -> list[str]:
    owned = parameters(layers)
    step = make_step(side, owned)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    if not expected:
        expected += [parameter.detach().clone() for parameter in owned]
    error = max(float((one - other).abs().max()) for one, other in zip(owned, expected, strict=True))
    for _ in range(_WARM_UP):
        step()
    times, host = [], []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        begin = time.perf_counter()
        step()
        host.append((time.perf_counter() - begin) * 1e3)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    figures = [f"{statistics.median(times):.3f}", f"{statistics.median(host):.3f}", str(kernels_of(step))]
    return [side, *figures, f"{first:.1f}", f"{error:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sides", default="foreach,fused,ours,inductor")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    table = Table("side", "ms", "host ms", "kernels", "first s", "differs by")
    expected: list[torch.Tensor] = []
    for side in given.sides.split(","):
        row = measure(side, given.layers, given.steps, expected)
        table.add_row(*row)
        print(*row, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
