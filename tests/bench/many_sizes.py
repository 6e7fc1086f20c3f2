"""What batches of ever new lengths cost: ours beside TorchInductor's with open sizes, each in a fresh process.

    python -m tests.bench.many_sizes [--model llama|bert] [--device cpu|cuda] [--lengths 8] [--layers 2]

Every length is trained on (forward and backward) in three passes. *Wait* is how much longer the first step of a length
took than its last, and *again* the same of the step between, which is what compiling cost; *stages* are those of ours
within it, where they exceed 5 ms (a stage may run within another). The step times are of the last pass. Both sides
start with empty caches. The first two lengths teach a compiler that the size is open, so totals are also given for the
lengths after the third.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core.observe.stage_times import Stopwatch
from tests.bench.rows import synchronise

ROOT = Path(__file__).parents[2]
SIDES = ("gradsplit", "inductor")
_VOCABULARY = 1000
_TAUGHT = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("llama", "bert"), default="llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, default=8, help="how many, of 64 to 512 tokens")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments)))
        return
    for side in arguments.sides.split(","):
        print_side(side, run_child(side))


def run_child(side: str) -> list[dict[str, Any]]:
    """One side in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "GRADSPLIT_CACHE": f"{cache}/gradsplit",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.bench.many_sizes", *sys.argv[1:], "--child", side]
        output = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(output.stdout.splitlines()[-1])


def measure(side: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each length, in the order they come: ``length``, ``first_s``, ``again_s``, ``last_s``, our ``stages``."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    model = language_model(arguments.model, arguments.layers, arguments.width).to(device)
    lengths = random.Random(0).sample(range(64, 513), arguments.lengths)
    gradsplit.config.cache_size_limit = torch._dynamo.config.recompile_limit = arguments.lengths + 8
    compiled: Callable[..., Any] = gradsplit.compile(model) if side == "gradsplit" else torch.compile(model)

    def step(length: int) -> float:
        tokens = torch.randint(_VOCABULARY, (2, length), device=device)
        synchronise(device)
        start_s = time.perf_counter()
        loss: Tensor = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        synchronise(device)
        model.zero_grad()
        return time.perf_counter() - start_s

    rows: list[dict[str, Any]] = []
    for length in lengths:
        stopwatch = Stopwatch()
        first_s = step(length)
        stages = {stage: sum(times) for stage, times in stopwatch.seconds().items()}
        rows.append({"length": length, "first_s": first_s, "stages": stages})
        print(f"{side}: length {length} first took {first_s:.2f} s", file=sys.stderr, flush=True)
    # A length seen before the size was open is compiled once more when it comes back.
    for row in rows:
        row["again_s"] = step(row["length"])
    for row in rows:
        row["last_s"] = step(row["length"])
    return rows


def language_model(name: str, layers: int, width: int) -> nn.Module:
    """A small language model in training; Llama's takes the loss of the next token, BERT's that of masked ones."""
    import transformers

    sizes = {
        "vocab_size": _VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False)).train()
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).train()


def print_side(side: str, rows: list[dict[str, Any]]) -> None:
    table = Table("length", "wait ms", "again ms", "step ms", "stages ms", title=side)
    waits = [row["first_s"] - row["last_s"] for row in rows]
    for row, wait in zip(rows, waits, strict=True):
        stages = sorted(row["stages"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{stage} {1e3 * seconds:.0f}" for stage, seconds in stages if seconds > 0.005)
        table.add_row(
            str(row["length"]),
            f"{1e3 * wait:.0f}",
            f"{1e3 * (row['again_s'] - row['last_s']):.0f}",
            f"{1e3 * row['last_s']:.1f}",
            shown,
        )
    Console(width=200).print(table)
    later = waits[_TAUGHT:]
    print(
        f"{side}: waits {sum(waits):.2f} s in all; after the third length {sum(later):.2f} s,"
        f" the longest {1e3 * max(later, default=0.0):.0f} ms;"
        f" step (last pass, median) {1e3 * statistics.median(row['last_s'] for row in rows):.1f} ms\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
