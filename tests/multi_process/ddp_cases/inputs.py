"""What becomes of inputs on their way into the module."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.multi_process.ddp_harness import (
    Net,
    case,
    check_in_graph,
    check_steps,
    data,
    loss_of,
    pair,
)


class Nested(Net):
    """Takes its input from a nested structure, and a factor that is no tensor."""

    def forward(self, batch: dict[str, Any], *, factor: float = 1.0) -> torch.Tensor:
        first, second = batch["parts"]
        return super().forward(first + second["x"]) * factor


def run(model: Any, step: int, device: str | None = None) -> None:
    first, second = data(step), data(step + 50)
    if device is not None:
        first, second = first.to(device), second.to(device)
    loss_of(model({"parts": [first, {"x": second}]}, factor=1.5)).backward()


@case()
def nested_inputs() -> None:
    stock, compiled = pair(Nested, backend="aot_eager")
    check_steps(stock, compiled, run)
    check_in_graph(compiled)


@case("cuda")
def inputs_are_moved_to_the_modules_device() -> None:
    stock, compiled = pair(Nested, backend="aot_eager", device_ids=[torch.cuda.current_device()])
    check_steps(stock, compiled, functools.partial(run, device="cpu"))
    check_in_graph(compiled)
