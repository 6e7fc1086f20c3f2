"""What CUDA graphs save: milliseconds and peak memory of a training step in each mode, beside torch's own.

``python -m tests.bench.step_overhead [--layers 4] [--vocabulary 50257] [--option shape_padding] [--peer]``
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import gradsplit
from examples.gpt import GPT, GPTConfig

_WARM_UP, _STEPS = 8, 30


def measure(name: str, wrap: Any, config: GPTConfig, batch: int) -> None:
    """Prints one line; the optimizer is left out, gradients are dropped after each step."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = GPT(config).cuda()
    call = wrap(model)
    times_ms = []
    for number in range(_WARM_UP + _STEPS):
        tokens, targets = torch.randint(0, config.vocabulary, (2, batch, config.context), device="cuda")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(tokens, targets)
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        model.zero_grad()
        if number >= _WARM_UP:
            times_ms.append(start.elapsed_time(end))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name:32} {statistics.median(times_ms):8.2f} ms  {peak_gib:6.2f} GiB  loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--option", action="append", default=[], help="measure with this option too")
    parser.add_argument("--peer", action="store_true", help="measure torch.compile too")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    config = GPTConfig(
        vocabulary=arguments.vocabulary,
        layers=arguments.layers,
        width=arguments.width,
        context=arguments.context,
    )
    measure("eager", lambda model: model, config, arguments.batch)
    for mode in gradsplit.list_mode_options():
        measure(
            f"gradsplit {mode}",
            lambda m, mode=mode: gradsplit.compile(m, mode=mode),
            config,
            arguments.batch,
        )
        if arguments.peer:
            measure(
                f"torch {mode}", lambda m, mode=mode: torch.compile(m, mode=mode), config, arguments.batch
            )
    for option in arguments.option:
        options = {option: True}
        measure(
            f"gradsplit {option}",
            lambda m, options=options: gradsplit.compile(m, options=options),
            config,
            arguments.batch,
        )
    bridge = {"triton.cudagraphs": True}
    measure(
        "gradsplit, inductor's kernels",
        lambda m: gradsplit.compile(m, backend="inductor"),
        config,
        arguments.batch,
    )
    measure(
        "the same, CUDA graphs",
        lambda m: gradsplit.compile(m, backend="inductor", options=bridge),
        config,
        arguments.batch,
    )


if __name__ == "__main__":
    main()
