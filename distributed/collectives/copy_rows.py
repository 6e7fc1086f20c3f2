"""Copies between GPUs whose rows lie apart in the target: copy engines do that, torch has kernels for it."""

from __future__ import annotations

import ctypes

import torch

from distributed.collectives.stream_meeting import load_driver

_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Side(ctypes.Structure):
    """Where a copy reads or writes, as the driver wants it."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch_bytes", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver."""

    _fields_ = (
        ("source", _Side),
        ("target", _Side),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_rows(target: int, pitch_bytes: int, source: int, row_bytes: int, rows: int) -> None:
    """Queues copies of rows on the current stream.

    Args:
        target: the address where the first row comes to lie; the others follow, each ``pitch_bytes`` behind the last.
        source: where they are, without gaps.

    Raises:
        RuntimeError: the driver cannot.
    """
    copy = _Copy(
        _Side(kind=_ON_DEVICE, address=source, pitch_bytes=row_bytes),
        _Side(kind=_ON_DEVICE, address=target, pitch_bytes=pitch_bytes),
        row_bytes,
        rows,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := load_driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream):
        raise RuntimeError(f"the driver copies no rows (CUDA error {error})")
