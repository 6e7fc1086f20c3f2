"""What batches of ever new lengths cost: ours beside TorchInductor's with open sizes, each in a fresh process.

    python -m tests.bench.many_sizes [--model llama|bert] [--device cpu|cuda] [--lengths 8] [--layers 2] [--ranks 2]

Every length is trained on (forward and backward) once, in the order in which they come: the *first* step of each, and
how long Python looked for garbage within it. Then
comes pass after pass until nothing is compiled any more, and one in which each length takes a few steps, of which the
median is its *step*. *Wait* is how much longer than that the longest step of a length was until then. The side ``each``
is ours without open sizes, with kernels made for each length as it comes; ``eager`` tells what a first step of a length
costs without a compiler, as libraries load kernels. All sides start with empty caches. The first
two lengths teach a compiler that the size is open, so figures are also given for the lengths after the third.

With ``--ranks`` the model is in DDP on so many ranks, which begin each step together, and figures are the slowest
rank's.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from tests.bench.ddp_steps import Ranks, start_process_group
from tests.bench.rows import synchronise

ROOT = Path(__file__).parents[2]
SIDES = ("gradsplit", "each", "inductor")
_TAUGHT = 3
_LONG_S = 0.6
# How often lengths come until all is compiled, and how often each for its time.
_PASSES, _STEPS = 4, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("llama", "bert"), default="llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, default=8, help="how many, of 64 to 512 tokens")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--autocast", action="store_true", help="to bfloat16")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--ranks", type=int, default=1, help="in DDP, where more than one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        rows = measure(arguments.child, arguments)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(rows))
        return
    for side in arguments.sides.split(","):
        print_side(side, run_child(side, arguments.ranks))


def run_child(side: str, ranks: int) -> list[dict[str, Any]]:
    """One side in processes of its own, with empty caches."""
    launcher = ["-m", "gradsplit.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "GRADSPLIT_CACHE": f"{cache}/gradsplit",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, *launcher, "-m", "tests.bench.many_sizes", *sys.argv[1:], "--child", side]
        output = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(output.stdout.splitlines()[-1])


def measure(side: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each length, in the order they come: ``length``, ``first_s``, ``later_s`` (several), ``step_s``."""
    torch.manual_seed(0)
    ranks, device = None, torch.device(arguments.device)
    if arguments.ranks > 1:
        device, ranks = start_process_group(), Ranks()
    model = language_model(arguments).to(device)
    if ranks is not None:
        model = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    lengths = random.Random(0).sample(range(64, 513), arguments.lengths)
    gradsplit.config.cache_size_limit = torch._dynamo.config.recompile_limit = arguments.lengths + 8
    compiled: Callable[..., Any] = {
        "gradsplit": lambda: gradsplit.compile(model),
        "each": lambda: gradsplit.compile(model, dynamic=False),
        "inductor": lambda: torch.compile(model),
        "eager": lambda: model,
    }[side]()

    collected_s: list[float] = []
    gc.callbacks.append(
        lambda phase, _: collected_s.append(time.perf_counter() * (-1 if phase == "start" else 1))
    )

    def step(length: int, is_watched: bool = False) -> float:
        if is_watched:
            # Tells on what a step waits that takes so long.
            faulthandler.dump_traceback_later(_LONG_S)
        try:
            return timed_step(length)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def timed_step(length: int) -> float:
        tokens = torch.randint(arguments.vocabulary, (arguments.batch, length), device=device)
        synchronise(device)
        if ranks is not None:
            ranks.barrier()
        start_s = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.autocast):
            loss: Tensor = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        synchronise(device)
        model.zero_grad()
        return time.perf_counter() - start_s

    rows: list[dict[str, Any]] = []
    for length in lengths:
        collected_s.clear()
        first_s = step(length, is_watched=len(rows) >= _TAUGHT)
        rows.append({"length": length, "first_s": first_s, "later_s": [], "garbage_s": sum(collected_s)})
        print(f"{side}: length {length} first took {rows[-1]['first_s']:.2f} s", file=sys.stderr, flush=True)
    # A length seen before the size was open is compiled once more when it comes back, and programs are taken up when
    # they are asked for.
    start_s = time.perf_counter()
    for _ in range(_PASSES):
        gradsplit.wait_for_compilations()
        for row in rows:
            row["later_s"].append(step(row["length"], is_watched=True))
    print(f"{side}: settled after {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)
    for row in rows:
        row["step_s"] = statistics.median(step(row["length"]) for _ in range(_STEPS))
    if ranks is not None:
        rows = [_slowest(every) for every in zip(*ranks.gather(rows), strict=True)]
        dist.destroy_process_group()
    return rows


def _slowest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A length as the slowest of the ranks saw it."""
    slowest = {name: max(row[name] for row in rows) for name in ("length", "first_s", "garbage_s", "step_s")}
    return {
        **slowest,
        "later_s": [max(times) for times in zip(*(row["later_s"] for row in rows), strict=True)],
    }


def language_model(arguments: argparse.Namespace) -> nn.Module:
    """A small language model in training; Llama's takes the loss of the next token, BERT's that of masked ones."""
    import transformers

    sizes = {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.width,
        "intermediate_size": 4 * arguments.width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "max_position_embeddings": 512,
    }
    if arguments.model == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False)).train()
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).train()


def print_side(side: str, rows: list[dict[str, Any]]) -> None:
    table = Table("length", "first ms", "garbage ms", "wait ms", "step ms", title=side)
    waits = [max(row["first_s"], *row["later_s"]) - row["step_s"] for row in rows]
    for row, wait in zip(rows, waits, strict=True):
        times_ms = (1e3 * s for s in (row["first_s"], row["garbage_s"], wait, row["step_s"]))
        table.add_row(str(row["length"]), *(f"{time_ms:.1f}" for time_ms in times_ms))
    Console(width=100).print(table)
    print(
        f"{side}: first steps {sum(row['first_s'] for row in rows):.2f} s in all;"
        f" longest wait after the third length {1e3 * max(waits[_TAUGHT:], default=0.0):.0f} ms;"
        f" all lengths once, in the end, {1e3 * sum(row['step_s'] for row in rows):.1f} ms\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
