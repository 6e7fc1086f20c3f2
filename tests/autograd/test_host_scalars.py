"""Numbers on the CPU that kernels of a GPU read, where no GPU is: which are moved, and that each call's is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.autograd.bound_graphs.moved_scalars import moved
from gradsplit.compile_core.autograd.captured_graphs.host_scalars import host_scalars
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from tests.autograd.compare_with_eager import captured
from tests.runtime.recorder_on_cpu import RecorderOnCpu

GPU = torch.device("cuda", 0)


def positions(program: Callable[..., Any], on_host: set[str], **gradients: bool) -> set[int]:
    """Which inputs of the program ``(x, scale)`` are moved, if the values with these names lie on the host."""
    module = captured(program)
    with FakeTensorMode():
        x, scale = torch.empty(4, device=GPU), torch.empty((), **gradients)
        for node in module.graph.nodes:
            node.meta["example_value"] = scale if node.name in on_host else x
    return set(host_scalars(module, [x, scale]))


def test_which_scalars_are_moved() -> None:
    def both(x: Tensor, scale: Tensor) -> Tensor:
        return torch.add(torch.mul(x, scale), scale)

    def computed_on_host(x: Tensor, scale: Tensor) -> Tensor:
        return torch.mul(x, torch.neg(scale))

    assert positions(both, set()) == {1}
    assert positions(computed_on_host, {"neg"}) == set()
    assert positions(both, set(), requires_grad=True) == set()
    assert positions(lambda x, scale: (x * scale, scale), set()) == set()
    assert positions(lambda x, scale: x + 1, set()) == set()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.tensor(2**53 + 1),
        torch.tensor(True),
        torch.tensor(1j),
        torch.tensor(0.1).bfloat16(),
    ],
)
def test_moved_numbers_are_the_same(value: Tensor) -> None:
    x = torch.ones(2)
    first, second = moved([x, value], {1: torch.device("cpu")})
    assert first is x and second is not value and second.dtype == value.dtype and torch.equal(second, value)


def test_replays_read_the_number_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecorderOnCpu()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=recorder))
    # Where a GPU is, the scalar is a fake tensor of the GPU.
    monkeypatch.setattr(pipeline, "host_scalars", lambda module, examples: _scalars(examples))
    compiled = gradsplit.compile(lambda x, scale: (x * scale).sin(), mode="reduce-overhead")
    x, scale = torch.randn(40000), torch.tensor(1.0)
    for step in range(5):
        scale = scale + step if step % 2 else scale.add_(1)
        x = x.detach().requires_grad_(step > 2)
        assert torch.allclose(compiled(x, scale), (x * scale).sin())
    assert recorder.replayed >= 2


def _scalars(examples: Any) -> dict[int, Tensor]:
    """As if the scalar were to be moved; the compilation with its substitute is not asked again."""
    if any(getattr(example, "is_substitute", False) for example in examples):
        return {}
    with examples[1].fake_mode:
        substitute = torch.empty(())
    substitute.is_substitute = True  # type: ignore[attr-defined]
    return {1: substitute}
