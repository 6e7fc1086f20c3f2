"""What a ``DistributedDataParallel`` module says of itself."""

from __future__ import annotations

import operator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The group that the module reduces over."""
    group = ddp.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


class CalledForward:
    """The forward that calls of the module end in: a program may replace it, on the wrapped module or its class."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._known = self._now()

    def has_changed(self) -> bool:
        """Whether it is another than when this was made or asked last."""
        known, self._known = self._known, self._now()
        return not all(map(operator.is_, known, self._known))

    def _now(self) -> tuple[Any, ...]:
        module = self._ddp.module
        return module, vars(module).get("forward"), type(module).forward
