"""The communicator that reduces buckets on GPUs: one that leaves room for the backward.

NCCL launches its kernels in clusters of thread blocks, of four by default, wherever multiprocessors are free, so every
group of multiprocessors (a GPC) of an H100 or H200 may lose a few to them. The products of a backward are launched in
clusters, too, of up to eight blocks, each of which must lie in one GPC: with 12 of 16 multiprocessors left one fits
where two did. That is how we explain that products take up to a third longer beside an all-reduce, and less with
clusters of eight, which leave more GPCs whole.

The size is a property of a communicator, and that of the module's process group is shared with the program; so buckets
have one of their own, for the same ranks. Those must be all of the job's: torch may split the new communicator off that
of the default group, which is a collective of all ranks, and names a group by how many a rank has made.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, _get_default_group, get_debug_level

from distributed.group_backend import backend_of

_BLOCKS_IN_A_CLUSTER = 8
_FIRST_WITH_CLUSTERS = (9, 0)

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def bucket_group(
    group: dist.ProcessGroup, device: torch.device, all_can: Callable[[str], bool]
) -> dist.ProcessGroup:
    """The process group for the buckets of modules over ``group`` that lie on ``device``; ``group`` itself where
    nothing is to be gained, or the user has chosen a size of clusters.

    A collective, called on all ranks of the group.

    Args:
        all_can: a collective, too: is told why this rank cannot have another group, or "", and tells whether all can.
    """
    if group in _made:
        return _made[group]
    if backend_of(group, device) != "nccl" or not 1 < group.size() == dist.get_world_size():
        return group
    if not all_can(_reason_against(group, device)):
        return group
    known: Any = group._get_backend(device).options
    options: Any = type(known)(is_high_priority_stream=known.is_high_priority_stream)
    options.config = known.config
    options.config.cga_cluster_size = _BLOCKS_IN_A_CLUSTER
    # NCCL splits no communicator that is in use.
    torch.cuda.synchronize(device)
    made = dist.new_group(timeout=known._timeout, backend="nccl", pg_options=options, device_id=device)
    assert isinstance(made, dist.ProcessGroup)
    _made[group] = made
    return made


def _reason_against(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why this rank must not have another group, or "". Ranks may have other GPUs, and another environment."""
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_CLUSTERS:
        return "its GPU has no clusters of thread blocks"
    if get_debug_level() == DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps its process group"
    bound = _get_default_group().bound_device_id
    if bound not in (None, device):
        return f"its default process group is bound to {bound}"
    backend: Any = group._get_backend(device)
    # A size that nobody has chosen is a negative number.
    if "NCCL_CGA_CLUSTER_SIZE" in os.environ or backend.options.config.cga_cluster_size >= 0:
        return "the size of its clusters was chosen"
    return ""
