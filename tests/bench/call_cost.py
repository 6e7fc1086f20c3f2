"""What a call of a small compiled graph costs: the Python round the kernels, ours beside torch.compile's.

    python tests/bench/call_cost.py [--rounds 20]

The tensors are so small that the kernels cost next to nothing. The time is the thread's processor time, in which the
backward of a CPU runs too; rounds of all sides alternate, and the table shows the median over rounds. Torch's compiler
starts anew for each row, so that no limit of recompilations is met.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from tests.bench.thread_seconds import median_seconds

SIDES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "ours, aot_eager": lambda model: gradsplit.compile(model, backend="aot_eager", fullgraph=True),
    "ours, default": lambda model: gradsplit.compile(model, backend=DEFAULT_BACKEND, fullgraph=True),
    "torch, aot_eager": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "torch, inductor": lambda model: torch.compile(model, backend="inductor", fullgraph=True),
}


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu().sum(-1)


class ManyLayers(nn.Module):
    """A hundred parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(50)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum(-1)


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    training: bool
    backward: bool


CASES = [
    Case("one layer, inference", OneLayer, False, False),
    Case("one layer, forward", OneLayer, True, False),
    Case("one layer, forward and backward", OneLayer, True, True),
    Case("50 layers, inference", ManyLayers, False, False),
    Case("50 layers, forward and backward", ManyLayers, True, True),
]


def make_call(case: Case, compile: Callable[[Any], Any]) -> Callable[[], Any]:
    torch.manual_seed(0)
    compiled = compile(case.model())
    x, ones = torch.randn(4, 8), torch.ones(4)

    def infer() -> Any:
        with torch.no_grad():
            return compiled(x)

    if not case.training:
        return infer
    return (lambda: compiled(x).backward(ones)) if case.backward else (lambda: compiled(x))


def measure(case: Case, rounds: int) -> list[float]:
    """Median seconds of a call, a side each."""
    torch._dynamo.reset()
    calls = [make_call(case, compile) for compile in SIDES.values()]
    return median_seconds(calls, rounds, 10e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds a side, of about 10 ms each")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table(title=f"A call in µs, median of {rounds} rounds (torch {torch.__version__})")
    table.add_column("case")
    for side in SIDES:
        table.add_column(side, justify="right")
    for case in CASES:
        table.add_row(case.name, *(f"{seconds * 1e6:.1f}" for seconds in measure(case, rounds)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
