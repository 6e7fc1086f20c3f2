"""How long the capture of a 12-layer GPT-2 takes on one core: ours beside torch.compile's, both with backend "eager".

    python tests/bench/capture_time.py [--rounds 3] [--profile]

Each measurement is the processor time of the first call of a freshly compiled model of real sizes (768 wide, 50,257
tokens) on a short sequence, less that of a second call. What either side imports or builds once for a process or a
machine is spent on another function before. Rounds alternate; the table shows medians.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import gradsplit
from examples.gpt import GPT, GPTConfig


def example_gpt() -> tuple[Callable[..., Any], dict[str, Any]]:
    tokens = torch.randint(0, 50257, (1, 32))
    config = GPTConfig(vocabulary=50257, context=1024, layers=12, heads=12, width=768)
    return GPT(config), {"tokens": tokens, "targets": tokens}


def transformers_gpt2() -> tuple[Callable[..., Any], dict[str, Any]]:
    tokens = torch.randint(0, 50257, (1, 32))
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": tokens}


MODELS = {"examples.gpt": example_gpt, "transformers GPT2LMHeadModel": transformers_gpt2}
SIDES = {"ours": gradsplit.compile, "torch.compile": torch.compile}


def capture_seconds(compile_with: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> float:
    """The first call of a compiled model, less a call that runs only."""
    torch._dynamo.reset()
    gradsplit.reset()  # equal modules share what was captured
    compiled = compile_with(model, backend="eager", fullgraph=True)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        compiled(**arguments)
        seconds.append(time.process_time() - start)
    return seconds[0] - seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, action="append", help="by default all")
    parser.add_argument("--profile", action="store_true", help="print where our time goes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"Capture on one core, median of {options.rounds} (torch {torch.__version__})")
    table.add_column("model")
    for column in ("ours [s]", "torch.compile [s]", "ours / theirs"):
        table.add_column(column, justify="right")
    for compile_with in SIDES.values():
        compile_with(lambda x: x + 1, backend="eager")(torch.ones(1))
    for name in options.model or MODELS:
        model, arguments = MODELS[name]()
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(capture_seconds, gradsplit.compile, model, arguments)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45).sort_stats("tottime").print_stats(
                30
            )
            continue
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, compile_with in SIDES.items():
                seconds[side].append(capture_seconds(compile_with, model, arguments))
        ours, theirs = (statistics.median(seconds[side]) for side in SIDES)
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}")
    if not options.profile:
        Console().print(table)


if __name__ == "__main__":
    main()
