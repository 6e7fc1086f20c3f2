"""The CUDA device and stream of this thread, without the checks of the public functions."""

from __future__ import annotations

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

_OWN_TEMPORARIES = "each recording of a CUDA graph has memory of its own for its temporaries"
begin_allocating = private(
    "torch._C:_cuda_beginAllocateCurrentThreadToPool",
    "memory that recordings of CUDA graphs share",
    _OWN_TEMPORARIES,
    lambda device, pool: None,
)
end_allocating = private(
    "torch._C:_cuda_endAllocateToPool",
    "memory that recordings of CUDA graphs share",
    _OWN_TEMPORARIES,
    lambda device, pool: None,
)
release_pool = private(
    "torch._C:_cuda_releasePool",
    "memory that recordings of CUDA graphs share",
    _OWN_TEMPORARIES,
    lambda device, pool: None,
)
