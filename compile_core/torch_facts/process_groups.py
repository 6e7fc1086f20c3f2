"""Torch's process groups and its DDP, beneath ``torch.distributed``'s public names."""

from __future__ import annotations

from gradsplit.compile_core.torch_facts.private_parts import private

FIRST_BUCKET_BYTES = private(
    "torch._C._distributed_c10d:_DEFAULT_FIRST_BUCKET_BYTES",
    "the sizes of stock DDP's buckets",
    "torch's default of 1 MiB",
    1 << 20,
)
assign_buckets = private(
    "torch._C._distributed_c10d:_compute_bucket_assignment_by_size", "the buckets of stock DDP"
)
SymmetricMemory = private(
    "torch._C._distributed_c10d:_SymmetricMemory",
    "copies between GPUs of one machine",
    "collectives go through NCCL alone",
    False,
)

store_of = private(
    "torch.distributed.distributed_c10d:_get_process_group_store",
    "messages between ranks beside their collectives",
)
world = private("torch.distributed.distributed_c10d:_world", "whether a process group still exists")
to_device = private("torch.distributed.utils:_to_kwargs", "moving a wrapped module's inputs to its device")
find_tensors = private(
    "torch.nn.parallel.distributed:_find_tensors",
    "explaining stock DDP's buckets",
    "explain_ddp has no answer for stock DDP",
)

_DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
_REDUCER = "compiling modules that stock DDP has wrapped"
active_ddp_module = private(_DDP + "_get_active_ddp_module", _REDUCER)
delayed_all_reduce_hook = private(_DDP + "_delayed_all_reduce_hook", _REDUCER)
run_ddp_forward = private(_DDP + "_run_ddp_forward", _REDUCER)
