"""What a ``DistributedDataParallel`` module says of itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The group that the module reduces over."""
    group = ddp.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients the module reduces, by name; a tied one has its first name only."""
    # Asked of DDP itself: a tied one counts under all of its names, some of which may be those to ignore.
    reduced = set(ddp._build_params_for_reducer()[0])
    return {name: parameter for name, parameter in ddp.module.named_parameters() if parameter in reduced}
