"""Inference of models with random weights: ours with and without ``freezing``, eager and TorchInductor's freezing.

    python -m tests.bench.inference [--models resnet50,bert,...] [--batches 1,32] [--rows 7] [--half] [--device cuda]
        [--sides eager,gradsplit,frozen,inductor] [--mode reduce-overhead]

All sides run in one process on the same tensors and take turns in rows of calls (``rows.py``). Figures: milliseconds of
a call (the median of rows, each the median of its calls), seconds of the first call, and how far the results of a side
lie from those of eager in float64, beside how far eager's own do (norm of the difference by norm). Names,
configurations and defaults are those of transformers, with fewer layers where these are alike.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsplit
from tests.bench.rows import Row, rows_in_turn, run_row, synchronise

_WARM_UP_S = 1.0
_FROZEN = {"freezing": True}


def _images(name: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}Model")(config)


def _text(name: str, **settings: Any) -> nn.Module:
    return _images(name, vocab_size=1000, **settings)


class Plain(nn.Module):
    """Convolutions and batch norms without skips, as in VGG."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *channels), channels, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


# Name -> the model, and the side of its images or the length of its texts.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (
        lambda: _images("ResNet", layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
        224,
    ),
    "resnet50": (lambda: _images("ResNet"), 224),
    "vgg": (lambda: Plain(32, 64, 128, 256), 128),
    "mobilenet_v2": (lambda: _images("MobileNetV2"), 224),
    "regnet": (lambda: _images("RegNet", depths=[1, 2, 3, 1]), 224),
    "convnext": (lambda: _images("ConvNext", depths=[1, 1, 3, 1]), 224),
    "vit": (lambda: _images("ViT", num_hidden_layers=4), 224),
    "bert": (lambda: _text("Bert", num_hidden_layers=4), 128),
    "gpt2": (lambda: _text("GPT2", n_layer=4), 128),
    "llama": (
        lambda: _text("Llama", num_hidden_layers=2, hidden_size=1024, intermediate_size=2816,
                      num_attention_heads=16, num_key_value_heads=4),
        128,
    ),
}  # fmt: skip


def side_of(name: str, model: nn.Module, mode: str | None) -> Callable[..., Any]:
    """The model as a side runs it."""
    if name == "gradsplit":
        return gradsplit.compile(model, mode=mode)
    if name == "frozen":
        return gradsplit.compile(
            model, options={**gradsplit.list_mode_options(mode), **_FROZEN} if mode else _FROZEN
        )
    if name == "inductor":
        options = torch._inductor.list_mode_options(mode) if mode else {}
        return torch.compile(model, options={**options, **_FROZEN})
    return model


def made(name: str, batch: int, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, with statistics of batch norms as after training, and its inputs."""
    torch.manual_seed(0)
    make, size = MODELS[name]
    model = make().eval().to(device)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None and part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2)
    if getattr(getattr(model, "config", None), "vocab_size", None):
        return model, {"input_ids": torch.randint(1000, (batch, size), device=device)}
    return model, {"pixel_values": torch.randn(batch, 3, size, size, device=device)}


def measure(name: str, batch: int, chosen: argparse.Namespace) -> list[str]:
    """A line of the table."""
    torch._dynamo.reset()
    gradsplit.reset()
    device = torch.device(chosen.device)
    model, inputs = made(name, batch, device)
    half = torch.autocast(device.type, torch.bfloat16) if chosen.half else contextlib.nullcontext()
    runs: dict[str, Callable[[], Row]] = {}
    first_s, results = {}, {}
    with torch.no_grad(), half:
        for side in chosen.sides:
            run = partial(side_of(side, model, chosen.mode), **inputs)
            begin = time.perf_counter()
            results[side] = _whole(run())
            synchronise(device)
            first_s[side] = time.perf_counter() - begin
            runs[side] = partial(run_row, run, device, chosen.calls)
        ms = {
            side: statistics.median(row.step_ms for row in rows)
            for side, rows in rows_in_turn(runs, _WARM_UP_S, chosen.rows).items()
        }
    with torch.no_grad():
        exact = _whole(
            model.double()(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
        )
    cells = []
    for side in chosen.sides:
        apart = float((results[side].double() - exact).norm() / exact.norm())
        cells.append(f"{ms[side]:.2f} ms  {first_s[side]:.1f} s  {apart:.0e}")
    return [f"{name} {batch}", *cells]


def _whole(result: Any) -> Tensor:
    value = result if isinstance(result, Tensor) else result.last_hidden_state
    return value.detach().clone()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*MODELS])
    parser.add_argument("--batches", type=lambda text: [*map(int, text.split(","))], default=[1, 32])
    parser.add_argument(
        "--sides", type=lambda text: text.split(","), default=["eager", "gradsplit", "frozen", "inductor"]
    )
    parser.add_argument("--mode", help="of all compiled sides")
    parser.add_argument("--half", action="store_true", help="under autocast, in bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3, help="in a row")
    chosen = parser.parse_args(arguments)
    table = Table("model, batch", *chosen.sides)
    for name in chosen.models:
        for batch in chosen.batches:
            line = measure(name, batch, chosen)
            print(" | ".join(line), flush=True)
            table.add_row(*line)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
