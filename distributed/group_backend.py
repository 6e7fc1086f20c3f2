"""Which backend of a process group carries the collectives of a device: a group may have one for each kind."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Its name, as ``"nccl"``; "" if the group has none for such devices."""
    # As "cpu:gloo,cuda:nccl", whatever was said when the group was made.
    kinds = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return kinds.get(device.type, "")
