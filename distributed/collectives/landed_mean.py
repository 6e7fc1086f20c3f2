"""The kernel behind ``narrow_average``: the mean of what has landed in a buffer and what this rank has."""

from __future__ import annotations

import torch

from compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from distributed.collectives.device_kernels import DeviceKernels, Launch

# Triton's names.
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
NARROW_TYPES = frozenset(_TYPES)
# 16-bit values land in rows of so many; each is one program's.
BLOCK = 8192
_PROGRAMS = 4096
_WARPS = 8
# What a program reads and then writes at a time: four elements a thread.
_SLICE = 4 * 32 * _WARPS


def kernel_source(dtype: torch.dtype, device: torch.device, programs: int = _PROGRAMS) -> KernelSource:
    """Of the mean of two ranks' values. The kernel's buffers:

    means: float32; what has landed lies there, too.
    landed: the same memory, of ``dtype``.
    narrow, wide: this rank's own values, of ``dtype`` and float32; those of one of them are read.
    told: one int32, the bytes of an element that has landed.
    sizes: as int64 the number of elements, and the bytes of an own one.
    """
    name, step = _TYPES[dtype], programs * BLOCK

    def block(mask: str) -> str:
        # From the last slice on: what is written then has been read. In a slice each thread has four elements of either
        # kind, so that none change threads.
        return f"""\
        for slice in tl.static_range({BLOCK // _SLICE}):
            place = begin + ({BLOCK - _SLICE} - {_SLICE} * slice) + tl.arange(0, {_SLICE})
            if own_itemsize == 2:
                own = tl.load(narrow + place{mask}).to(tl.float32)
            else:
                own = tl.load(wide + place{mask})
            if landed_itemsize == 2:
                other = tl.load(landed + begin + place{mask}).to(tl.float32)
            else:
                other = tl.load(means + place{mask})
            tl.debug_barrier()
            tl.store(means + place, (own + other) * 0.5{mask})
"""

    text = f"""\
@triton.jit
def {KERNEL_SYMBOL}(means, landed, narrow, wide, told, sizes):
    numel = tl.load(sizes)
    own_itemsize = tl.load(sizes + 1)
    landed_itemsize = tl.load(told)
    begin = tl.program_id(0).to(tl.int64) * {BLOCK}
    while begin + {BLOCK} <= numel:
        begin = tl.multiple_of(begin, {BLOCK})
{block("")}\
        begin += {step}
    if begin < numel:
        begin = tl.multiple_of(begin, {BLOCK})
{block(", mask=place < numel")}\
"""
    return KernelSource(
        name=f"landed_mean_of_{name}",
        language="triton",
        text=text,
        buffers=("means", "landed", "narrow", "wide", "told", "sizes"),
        device=device,
        pointers=("*fp32", f"*{name}", f"*{name}", "*fp32", "*i32", "*i64"),
        grid=(programs, 1, 1),
        meta=(("num_warps", _WARPS),),
    )


class LandedMean(DeviceKernels):
    """``means = (landed + own) / 2`` on one GPU."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        super().__init__(kernel_source, device, launch)

    def __call__(
        self, means: torch.Tensor, own: torch.Tensor, told: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """
        Args:
            means: with what has landed, as ``narrow_average`` says.
            own: as many elements, of ``dtype`` or of float32.
            told: one int32.
            dtype: of 16 bits, built.
        """
        landed = means.view(dtype)
        narrow, wide = (own, means) if own.dtype == dtype else (landed, own)
        sizes = self.numbers(own.numel(), own.itemsize)
        self.launch(dtype, means, landed, narrow, wide, told, sizes)
