"""The kernel that averages what has landed with what a rank has, in the place of what has landed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed.collectives.landed_mean import LandedMean
from tests.distributed.collectives.landed_examples import DTYPES, SIZES, check
from tests.lowering.interpreted_kernels import run_interpreted


def test_means_in_the_interpreter(tmp_path: Path) -> None:
    run_interpreted("-m", "tests.distributed.collectives.landed_examples", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_means_on_a_gpu(dtype: torch.dtype) -> None:
    mean = LandedMean(torch.device("cuda", 0), lambda kernel, *tensors: kernel(*tensors))
    mean.build(dtype)
    for numel in SIZES:
        check(mean, dtype, numel, "cuda")
