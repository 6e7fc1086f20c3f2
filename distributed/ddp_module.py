"""What a ``DistributedDataParallel`` module says of itself."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The group that the module reduces over."""
    group = ddp.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group
