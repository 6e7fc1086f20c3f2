"""The kernel of means: rounded as NCCL rounds, in every dtype and size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
