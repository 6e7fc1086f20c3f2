"""What a ``DistributedDataParallel`` module says of itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Of parameters, by identity.
Names = dict[torch.nn.Parameter, str]


def parameter_names(ddp: DistributedDataParallel) -> Names:
    """What the parameters of the module that it wraps are called now; a tied one has its first name only."""
    return {parameter: name for name, parameter in ddp.module.named_parameters()}


def process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The group that the module reduces over."""
    group = ddp.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group
