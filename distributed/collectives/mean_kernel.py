"""The one kernel that averaging by copies takes: sum and quotient in one pass over memory."""

from __future__ import annotations

import torch

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.distributed.collectives.device_kernels import DeviceKernels, Launch

# Triton's names of dtypes, and of those that they are added in.
_TYPES = {
    torch.float16: ("fp16", "float32"),
    torch.bfloat16: ("bf16", "float32"),
    torch.float32: ("fp32", "float32"),
    torch.float64: ("fp64", "float64"),
}
# Buffers of other dtypes are NCCL's.
AVERAGED_TYPES = frozenset(_TYPES)
_BLOCK = 4096
# One block each for all but the largest parts: short programs let the backward's in between.
_PROGRAMS = 8192


def kernel_source(dtype: torch.dtype, device: torch.device, programs: int = _PROGRAMS) -> KernelSource:
    """Of ``part = (part + other) / divisor``, where ``sizes`` has the number of elements and the divisor as int64."""
    name, kind = _TYPES[dtype]
    step = programs * _BLOCK
    # The factor is rounded once, as NCCL's is.
    # Whole blocks need no mask, and are read in wide words.
    text = f"""\
@triton.jit
def {KERNEL_SYMBOL}(part, other, sizes):
    numel = tl.load(sizes)
    factor = (1.0 / tl.load(sizes + 1).to(tl.float64)).to(tl.{kind})
    begin = tl.program_id(0).to(tl.int64) * {_BLOCK}
    while begin + {_BLOCK} <= numel:
        place = tl.multiple_of(begin, {_BLOCK}) + tl.arange(0, {_BLOCK})
        mine = tl.load(part + place)
        total = mine.to(tl.{kind}) + tl.load(other + place).to(tl.{kind})
        tl.store(part + place, (total * factor).to(mine.dtype))
        begin += {step}
    place = begin + tl.arange(0, {_BLOCK})
    inside = place < numel
    mine = tl.load(part + place, mask=inside)
    total = mine.to(tl.{kind}) + tl.load(other + place, mask=inside).to(tl.{kind})
    tl.store(part + place, (total * factor).to(mine.dtype), mask=inside)
"""
    return KernelSource(
        name=f"mean_of_{name}",
        language="triton",
        text=text,
        buffers=("part", "other", "sizes"),
        device=device,
        pointers=(f"*{name}", f"*{name}", "*i64"),
        grid=(programs, 1, 1),
        meta=(("num_warps", 4),),
    )


class MeanKernel(DeviceKernels):
    """``part = (part + other) / divisor`` for two contiguous tensors of as many elements, on one GPU."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        super().__init__(kernel_source, device, launch)

    def __call__(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        self.launch(part.dtype, part, other, self.numbers(part.numel(), divisor))
