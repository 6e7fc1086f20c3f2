"""Copies between GPUs whose rows lie apart in the target: copy engines do that, torch has kernels for it."""

from __future__ import annotations

import ctypes
import struct

from distributed.collectives.stream_meeting import load_driver

_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
# CUDA_MEMCPY2D of the driver. Of the source, and then of the target: a place in it, where it is, an address of the
# host's, its own, an array's, and the pitch of its rows; at last the rows' bytes and their number.
_COPY = struct.Struct("NNIPPPN NNIPPPN NN")


def copy_rows(target: int, pitch_bytes: int, source: int, row_bytes: int, rows: int, stream: int) -> None:
    """Queues copies of rows.

    Args:
        target: the address where the first row comes to lie; the others follow, each ``pitch_bytes`` behind the last.
        source: where they are, without gaps.
        stream: the driver's handle of it.

    Raises:
        RuntimeError: the driver cannot.
    """
    of_source = (0, 0, _ON_DEVICE, 0, source, 0, row_bytes)
    of_target = (0, 0, _ON_DEVICE, 0, target, 0, pitch_bytes)
    copy = _COPY.pack(*of_source, *of_target, row_bytes, rows)
    if error := load_driver().cuMemcpy2DAsync_v2(copy, ctypes.c_void_p(stream)):
        raise RuntimeError(f"the driver copies no rows (CUDA error {error})")
