"""What a call costs whose guards hold: ours beside torch.compile's, on the same inputs in one process.

    python tests/bench/guard_cost.py [--rounds 40] [--check]

Both compile with the same backend, which returns a constant at once, so that nothing is measured but finding the entry,
handing the graph its inputs and rebuilding the result. The time is the thread's processor time, rounds of the two
alternate, and the table shows the median over rounds: on a busy machine both sides see the same disturbance.

Up to torch 2.12 torch.compile passes over whole modules whose dictionaries have the tags of the last call. Torch has
turned that off since, for it may read freed memory, and so does this bench: with it, a call of torch 2.11's costs less.

With --check the exit status is 1 if a call of a module costs more than torch.compile's.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsplit
from tests.bench.thread_seconds import median_seconds


def returning_at_once(
    module: torch.fx.GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., tuple[Tensor, ...]]:
    """A backend whose compiled graph returns what it made at compile time."""
    del inputs
    (output,) = module.graph.find_nodes(op="output")
    results = tuple(torch.zeros(node.meta["example_value"].shape) for node in output.args[0])
    return lambda *tensors: results


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * channels
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50(nn.Module):
    """The layers of ResNet-50 (161 parameters, 159 buffers), an eighth as wide."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        channels_in = width
        stages = []
        for index, blocks in enumerate((3, 4, 6, 3)):
            channels = width << index
            layers = []
            for block in range(blocks):
                layers.append(Bottleneck(channels_in, channels, 2 if index and not block else 1))
                channels_in = 4 * channels
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


def combine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).relu() + x


@dataclass(frozen=True)
class Case:
    """A call that both sides compile; ``model`` makes a fresh function or module."""

    name: str
    model: Callable[[], Callable[..., Any]]
    arguments: tuple[Tensor, ...]
    grad: bool


def resnet(training: bool) -> nn.Module:
    torch.manual_seed(0)
    return ResNet50().train(training)


def cases() -> list[Case]:
    images = torch.randn(2, 3, 32, 32)
    pair = (torch.randn(8), torch.randn(8))
    return [
        Case("ResNet-50, train, grad", lambda: resnet(True), (images,), True),
        Case("ResNet-50, train, no_grad", lambda: resnet(True), (images,), False),
        Case("ResNet-50, eval, no_grad", lambda: resnet(False), (images,), False),
        Case("two tensors", lambda: combine, pair, True),
    ]


def measure(case: Case, rounds: int) -> tuple[float, float]:
    """Median seconds of a guard-hit call: ours, torch.compile's."""
    with torch.set_grad_enabled(case.grad):
        torch._dynamo.reset()
        ours = gradsplit.compile(case.model(), backend=returning_at_once, fullgraph=True)
        theirs = torch.compile(case.model(), backend=returning_at_once, fullgraph=True)
        calls = [lambda: ours(*case.arguments), lambda: theirs(*case.arguments)]
        ours_s, theirs_s = median_seconds(calls, rounds, 5e-3)
    return ours_s, theirs_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds a side, of about 5 ms each")
    parser.add_argument("--check", action="store_true", help="fail where ours costs more")
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    if torch.__version__ < (2, 13):
        torch._dynamo.config.use_recursive_dict_tags_for_guards = False
    table = Table(title=f"A guard-hit call, median of {rounds} rounds (torch {torch.__version__})")
    table.add_column("case")
    for column in ("ours [µs]", "torch.compile [µs]", "ours / theirs"):
        table.add_column(column, justify="right")
    costs_more = False
    for case in cases():
        ours, theirs = measure(case, rounds)
        costs_more |= ours > theirs
        table.add_row(case.name, f"{ours * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{ours / theirs:.2f}")
    Console().print(table)
    if options.check and costs_more:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
