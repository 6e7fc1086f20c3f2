"""The communicator that reduces buckets on GPUs: one that leaves room for the backward.

NCCL launches its kernels in clusters of thread blocks, of four by default, wherever multiprocessors are free, so every
group of multiprocessors (a GPC) of an H100 or H200 may lose a few to them. The products of a backward are launched in
clusters, too, of up to eight blocks, each of which must lie in one GPC: with 12 of 16 multiprocessors left one fits
where two did. That is how we explain that products take up to a third longer beside an all-reduce, and less with
clusters of eight, which leave more GPCs whole.

The size is a property of a communicator, and that of the module's process group is shared with the program; so buckets
have one of their own, for the same ranks.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

_BLOCKS_IN_A_CLUSTER = 8
_FIRST_WITH_CLUSTERS = (9, 0)

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def bucket_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The process group for the buckets of modules over ``group`` that lie on ``device``; ``group`` itself where
    nothing is to be gained, or the user has chosen a size of clusters.

    A collective, called on all ranks of the group.
    """
    if group not in _made:
        if not _gains(group, device):
            return group
        known: Any = group._get_backend(device).options
        options: Any = type(known)(is_high_priority_stream=known.is_high_priority_stream)
        options.config = known.config
        options.config.cga_cluster_size = _BLOCKS_IN_A_CLUSTER
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=known._timeout,
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            device_id=device,
        )
        assert isinstance(made, dist.ProcessGroup)
        _made[group] = made
    return _made[group]


def _gains(group: dist.ProcessGroup, device: torch.device) -> bool:
    if dist.get_backend(group) != "nccl" or group.size() == 1:
        return False
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_CLUSTERS:
        return False
    backend: Any = group._get_backend(device)
    config = backend.options.config
    # A size that nobody has chosen is a negative number.
    return "NCCL_CGA_CLUSTER_SIZE" not in os.environ and config.cga_cluster_size < 0
