"""Which of torch's two CPU matrix products is faster on this machine: the BLAS that ``aten.mm`` calls, or oneDNN.

Some of torch's x86 wheels call an MKL that leaves half the speed of AMD's AVX-512 processors unused; oneDNN does not,
but costs more to call, and torch copies a left operand whose rows are not dense, as that of a weight's gradient. Two
sizes are measured once for a machine and kept in the build cache: a small one gives the cost of a call, a large one
those of a multiplication and of a copied element.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradsplit.compile_core.lowering.cpp_kernels.cpp_machine import machine_identity
from gradsplit.compile_core.toolchain.disk_cache import DiskCache, content_key

_SMALL, _LARGE = 16, 384
_FILE = "seconds.json"
# What a measurement is off by: where both are about as fast, BLAS, which needs no copies and writes to a given place.
_MARGIN = 0.95


@dataclass(frozen=True)
class GemmSpeed:
    """Seconds a call and seconds a multiply-add, of both, and an element of a left operand that is copied."""

    blas_call_s: float
    blas_multiply_s: float
    onednn_call_s: float
    onednn_multiply_s: float
    onednn_copy_s: float

    def prefers_onednn(self, rows: int, inner: int, columns: int, is_dense: bool = True) -> bool:
        """Whether oneDNN clearly takes less time for ``[rows, inner] @ [inner, columns]`` in float32.

        Args:
            is_dense: the left operand lies in row-major order without gaps.
        """
        multiplies = rows * inner * columns
        blas_s = self.blas_call_s + multiplies * self.blas_multiply_s
        copied = 0 if is_dense else rows * inner
        onednn_s = self.onednn_call_s + multiplies * self.onednn_multiply_s + copied * self.onednn_copy_s
        return onednn_s < _MARGIN * blas_s


def onednn_linear() -> Callable[..., torch.Tensor] | None:
    """torch's oneDNN product ``X @ W.T + bias`` for dense tensors, where this build of torch has it."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def gemm_speed(cache_folder: Path) -> GemmSpeed | None:
    """The speeds on this machine with torch's present number of threads; ``None`` where there is no oneDNN."""
    if onednn_linear() is None:
        return None
    return _gemm_speed(cache_folder, torch.get_num_threads())


@cache
def _gemm_speed(cache_folder: Path, threads: int) -> GemmSpeed:
    key = content_key("gemm-speeds", machine_identity(), str(threads))
    return DiskCache(cache_folder).load(
        key,
        lambda folder: _write(folder / _FILE),
        lambda folder: GemmSpeed(**json.loads((folder / _FILE).read_text())),
    )


def _write(path: Path) -> None:
    linear: Any = onednn_linear()
    blas = [_measure(lambda a, b: torch.mm(a, b), size) for size in (_SMALL, _LARGE)]
    onednn = [_measure(lambda a, b: linear(a, b, None, "none", [], ""), size) for size in (_SMALL, _LARGE)]
    copying = _measure(lambda a, b: linear(a.t(), b, None, "none", [], ""), _LARGE)
    multiplies = _LARGE**3 - _SMALL**3
    path.write_text(
        json.dumps(
            {
                "blas_call_s": blas[0],
                "blas_multiply_s": (blas[1] - blas[0]) / multiplies,
                "onednn_call_s": onednn[0],
                "onednn_multiply_s": (onednn[1] - onednn[0]) / multiplies,
                "onednn_copy_s": max(0.0, copying - onednn[1]) / _LARGE**2,
            }
        )
    )


def _measure(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: int) -> float:
    """The shortest of several times: whatever else the machine does only adds to it."""
    with torch.no_grad():
        matrix = torch.ones(size, size, dtype=torch.float32, device="cpu")  # whatever the program's defaults
        times_s = []
        for _ in range(12):
            start_s = time.perf_counter()
            product(matrix, matrix)
            times_s.append(time.perf_counter() - start_s)
    return min(times_s)
