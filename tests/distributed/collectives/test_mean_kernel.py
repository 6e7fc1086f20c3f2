"""The kernel of means: rounded as NCCL rounds, in every dtype and size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.distributed.collectives import mean_kernel
from gradsplit.distributed.collectives.mean_kernel import MeanKernel
from tests.distributed.collectives.mean_examples import DTYPES, SIZES, check
from tests.lowering.interpreted_kernels import run_interpreted


def test_means_in_the_interpreter(tmp_path: Path) -> None:
    run_interpreted("-m", "tests.distributed.collectives.mean_examples", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_means_on_a_gpu(dtype: torch.dtype) -> None:
    mean = MeanKernel(torch.device("cuda", 0), lambda kernel, *tensors: kernel(*tensors))
    mean.build(dtype)
    for numel in SIZES:
        for divisor in (1, 2, 3):
            check(mean, dtype, numel, divisor, "cuda")


CPU = torch.device("cpu")


def launch(kernel: Callable[..., None], *tensors: torch.Tensor) -> None:
    kernel(*tensors)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any]]]:
    """What kernels are called with: their names, and tensors as lists."""
    found: list[tuple[str, list[Any]]] = []

    def build(sources: list[KernelSource], folder: Path) -> dict[str, Callable[..., None]]:
        (source,) = sources
        return {
            source.name: lambda *tensors: found.append((source.name, [tensor.tolist() for tensor in tensors]))
        }

    monkeypatch.setattr(mean_kernel, "build", build)
    return found


def test_the_mean_kernel_is_told_sizes_and_divisor(calls: list[tuple[str, list[Any]]]) -> None:
    mean = MeanKernel(CPU, launch)
    for dtype in (torch.float32, torch.float64, torch.float32):
        mean.build(dtype)
    part = torch.ones(3, dtype=torch.float64)
    mean(part, part + 1, 2)
    mean(part, part, 5)
    assert calls == [
        ("mean_of_fp64", [[1.0] * 3, [2.0] * 3, [3, 2]]),
        ("mean_of_fp64", [[1.0] * 3, [1.0] * 3, [3, 5]]),
    ]
