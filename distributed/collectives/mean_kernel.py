"""The one kernel that averaging by copies takes: sum and quotient in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, BuiltKernel, KernelSource
from gradsplit.compile_core.lowering.build import build
from gradsplit.compile_core.options import default_cache_folder

# Given a kernel and the tensors of its buffers.
Launch = Callable[..., object]

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


class MeanKernel:
    """``part = (part + other) / divisor`` for two contiguous tensors of as many elements, on one GPU.

    Args:
        device: the GPU.
        launch: launches one of the kernels, of which there is one for each dtype.
    """

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device, self._launch = device, launch
        self._kernels: dict[torch.dtype, BuiltKernel] = {}
        # One kernel serves all sizes and divisors, so that no plan has to wait for a compiler.
        self._sizes: dict[tuple[int, int], torch.Tensor] = {}

    def build(self, dtype: torch.dtype) -> None:
        """Before its first use; raises CompileError where Triton fails."""
        if dtype not in self._kernels:
            source = kernel_source(dtype, self._device)
            self._kernels[dtype] = build([source], default_cache_folder())[source.name]

    def __call__(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        values = (part.numel(), divisor)
        sizes = self._sizes.get(values)
        if sizes is None:
            # Nothing here waits for the stream, which may wait for other ranks.
            sizes = self._sizes[values] = torch.empty(2, dtype=torch.int64, device=self._device)
            for place, value in enumerate(values):
                sizes[place].fill_(value)
        self._launch(self._kernels[part.dtype], part, other, sizes)
