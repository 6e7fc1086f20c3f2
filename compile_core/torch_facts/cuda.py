"""The CUDA device and stream of this thread, without the checks of the public functions."""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.torch_facts.private_parts import private

_WITHOUT_CUDA = "kernels for GPUs are not launched; there are none in a torch without CUDA"

current_raw_stream = private(
    "torch._C:_cuda_getCurrentRawStream", "launching kernels on the current stream", _WITHOUT_CUDA
)
current_device = private(
    "torch._C:_cuda_getDevice",
    "the device of this thread",
    "the public function, which is slower",
    torch.cuda.current_device,
)
current_stream_parts = private(
    "torch._C:_cuda_getCurrentStream", "overlap of collectives on GPUs", _WITHOUT_CUDA
)
sleep = private("torch.cuda:_sleep", "measuring clocks of several streams", _WITHOUT_CUDA)


def _of_pools(name: str) -> Any:
    return private(
        f"torch._C:{name}",
        "memory that recordings of CUDA graphs share",
        "each recording has memory of its own for its temporaries",
        lambda device, pool: None,
    )


begin_allocating = _of_pools("_cuda_beginAllocateCurrentThreadToPool")
end_allocating = _of_pools("_cuda_endAllocateToPool")
release_pool = _of_pools("_cuda_releasePool")
