"""Training steps of known models on a GPU: ours, TorchInductor, and its kernels under our schedule, in one table.

    python -m tests.bench.gpu_training [--models densenet121,bert,gpt2,resnet50,graph] [--sides ...] [--rows 6]

A step is forward and backward under bf16 autocast, float32 products at "high", gradients dropped before it. The sides
of a model live in one process, each with a copy of the same weights, and take turns in rows of steps (``rows.py``).
Figures: milliseconds by CUDA events (the median of rows, each the median of its steps), seconds of the first step with
empty caches, and the peak of allocated memory over some steps, without what other sides hold; the loss of the first
step tells that sides compute the same (dropout is off).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor_config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsplit
from tests.bench.rows import Row, rows_in_turn, run_row
from tests.bench.training_models import Classified, Loss, graph_network

Inputs = dict[str, Tensor]
# Steps of a side before its memory is looked at: libraries choose, graphs are recorded.
_SETTLING = 8
_STEPS_OF_PEAK = 3
_WARM_UP_S = 1.5
_IN_A_ROW = 10


def _images(name: str, batch: int, size: int) -> tuple[nn.Module, Inputs]:
    import torchvision  # type: ignore[import-not-found]  # only where the GPUs are

    model = torchvision.models.get_model(name, weights=None)
    return Classified(model), {
        "pixels": torch.randn(batch, 3, size, size),
        "labels": torch.randint(1000, (batch,)),
    }


def _text(model: nn.Module, vocabulary: int, batch: int, length: int) -> tuple[nn.Module, Inputs]:
    tokens = torch.randint(vocabulary, (batch, length))
    return Loss(model), {"input_ids": tokens, "labels": tokens.clone()}


def _bert() -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _text(transformers.BertForMaskedLM(config), config.vocab_size, 16, 512)


def _gpt2() -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers logs a warning from inside the forward
    return _text(model, config.vocab_size, 8, 1024)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "densenet121": lambda: _images("densenet121", 16, 128),
    "bert": _bert,
    "gpt2": _gpt2,
    "resnet50": lambda: _images("resnet50", 64, 224),
    "graph": graph_network,
}

SIDES: Mapping[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "inductor": torch.compile,
    "inductor reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "gradsplit": gradsplit.compile,
    "gradsplit reduce-overhead": lambda model: gradsplit.compile(model, mode="reduce-overhead"),
    # The loss over a vocabulary whole, and in chunks of other sizes.
    **{
        f"gradsplit chunks {mib}": lambda model, mib=mib: gradsplit.compile(
            model, options={"chunk_bytes": mib << 20}
        )
        for mib in (0, 64, 128, 256, 512)
    },
    "gradsplit chunks 128 budget 85": lambda model: gradsplit.compile(
        model, options={"chunk_bytes": 128 << 20, "activation_memory_budget": 0.85}
    ),
    "bridge": lambda model: gradsplit.compile(model, backend="inductor"),
}


@dataclass(frozen=True)
class Figures:
    """Of one side; ``step_ms`` is not known when it is set up."""

    first_s: float
    peak_gib: float
    loss: float
    step_ms: float = 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        return f"{self.step_ms:.2f}", f"{self.first_s:.1f}", f"{self.peak_gib:.2f}", f"{self.loss:.4f}"


def set_up(
    model: nn.Module, inputs: Inputs, wrap: Callable[[nn.Module], Any]
) -> tuple[Callable[[], Tensor], Figures]:
    """A step of one side, which gives its loss, and what its first steps tell; ``model`` stays as it is."""
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    module = copy.deepcopy(model).cuda()
    call = wrap(module)

    def step() -> Tensor:
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(**inputs)
        loss.backward()
        return loss.detach()

    torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = step().item()
    first_s = time.perf_counter() - begin
    for _ in range(_SETTLING):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS_OF_PEAK):
        step()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    return step, Figures(first_s, peak_bytes / 2**30, loss)


def measure(name: str, sides: Sequence[str], caches: str, rows: int) -> dict[str, Figures]:
    """The sides of one model."""
    torch._dynamo.reset()
    gradsplit.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    inputs = {key: value.cuda() for key, value in inputs.items()}
    found: dict[str, Figures] = {}
    runs: dict[str, Callable[[], Row]] = {}
    for side in sides:
        os.environ["GRADSPLIT_CACHE"] = f"{caches}/{name} {side}"
        step, found[side] = set_up(model, inputs, SIDES[side])
        runs[side] = partial(run_row, step, torch.device("cuda"), _IN_A_ROW)
    for side, mine in rows_in_turn(runs, _WARM_UP_S, rows).items():
        found[side] = replace(found[side], step_ms=statistics.median(row.step_ms for row in mine))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    chosen = ",".join(side for side in SIDES if " chunks " not in side)
    parser.add_argument("--sides", default=chosen, help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rows", type=int, default=6, help=f"measured ones, of {_IN_A_ROW} steps")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    inductor_config.force_disable_caches = True
    table = Table("model", "side", "step ms", "first s", "peak GiB", "loss")
    measured: dict[tuple[str, str], Figures] = {}
    with tempfile.TemporaryDirectory() as caches:
        for name in arguments.models.split(","):
            for side, figures in measure(name, arguments.sides.split(","), caches, arguments.rows).items():
                measured[name, side] = figures
                table.add_row(name, side, *figures.cells)
                print(name, side, *figures.cells, flush=True)
    Console(width=100).print(table)
    for line in summary(measured):
        print(line)


def summary(measured: Mapping[tuple[str, str], Figures]) -> list[str]:
    """For each mode our time over TorchInductor's, by model and as the geometric mean."""
    lines = []
    for mode in ("", " reduce-overhead"):
        ratios = {
            name: figures.step_ms / measured[name, f"inductor{mode}"].step_ms
            for (name, side), figures in measured.items()
            if side == f"gradsplit{mode}" and (name, f"inductor{mode}") in measured
        }
        if ratios:
            each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            mean = statistics.geometric_mean(ratios.values())
            lines.append(f"gradsplit{mode} / inductor{mode}: {each}; geometric mean {mean:.3f}")
    return lines


if __name__ == "__main__":
    main()
