"""Kernels of one kind, one for each dtype, on one GPU, and the numbers that they read there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsplit.compile_core.ir.kernels import BuiltKernel, KernelSource
from gradsplit.compile_core.lowering.build import build
from gradsplit.compile_core.options import default_cache_folder

# Given a kernel and the tensors of its buffers.
Launch = Callable[..., object]


class DeviceKernels:
    """
    Args:
        source: of the kernel for a dtype and a device.
        device: the GPU.
        launch: launches one of them.
    """

    def __init__(
        self,
        source: Callable[[torch.dtype, torch.device], KernelSource],
        device: torch.device,
        launch: Launch,
    ) -> None:
        self._source, self._device, self._launch = source, device, launch
        self._kernels: dict[torch.dtype, BuiltKernel] = {}
        self._numbers: dict[tuple[int, ...], torch.Tensor] = {}

    def build(self, dtype: torch.dtype) -> None:
        """Before its first use; raises CompileError where Triton fails."""
        if dtype not in self._kernels:
            source = self._source(dtype, self._device)
            self._kernels[dtype] = build([source], default_cache_folder())[source.name]

    def launch(self, dtype: torch.dtype, *buffers: torch.Tensor) -> None:
        """The kernel for a dtype, which is built."""
        self._launch(self._kernels[dtype], *buffers)

    def numbers(self, *values: int) -> torch.Tensor:
        """These as int64. One kernel serves all numbers, so that no plan has to wait for a compiler."""
        found = self._numbers.get(values)
        if found is None:
            # Nothing here waits for the stream, which may wait for other ranks.
            found = self._numbers[values] = torch.empty(len(values), dtype=torch.int64, device=self._device)
            for place, value in enumerate(values):
                found[place].fill_(value)
        return found
