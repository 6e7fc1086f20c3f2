"""Broadcasts a module's buffers from the first rank, as stock DDP does before each forward.

Stock DDP looks for the buffers in all modules each time, and copies each into and out of the message by itself: for a
deep network that is milliseconds of the host's time, in front of the first kernel of a step. Here what was found is
only compared, the message is one piece of memory, and copies are one call for all buffers of a dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing.bucket import ALIGNMENT_BYTES
from gradsplit.compile_core.torch_facts.autograd_engine import foreach_copy

# torch exports it without declaring it.

_address_of = torch.Tensor.data_ptr
_size_of = torch.Tensor.numel


class BufferBroadcast:
    """Broadcasts the buffers of one module; a collective of the group's ranks.

    Args:
        wait: waits for a collective.
        begins: is called with what begins, and whether that waits for other ranks.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: dist.ProcessGroup,
        wait: Callable[[dist.Work], None],
        begins: Callable[[str, bool], None],
    ) -> None:
        self._ddp = ddp
        self._group = group
        self._wait, self._begins = wait, begins
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._tables = _Tables(ddp.module)
        self._buffers: list[torch.Tensor] = []
        # Where each buffer lies, and after these how large each is: one may get a part of its memory, or more of it.
        self._places: list[int] | None = None
        self._messages: list[_Message] = []

    def __call__(self) -> None:
        """The buffers are rank 0's for whatever comes next: on the current stream, if they are on a GPU."""
        if self._tables.module is not self._ddp.module or self._tables.changed():
            self._tables = _Tables(self._ddp.module)
            self._places = None
        if self._places is None or self._places != self._places_now():
            self._find_buffers()
        is_root = self._group.rank() == 0
        for message in self._messages:
            if is_root:
                message.pack()
            self._begins(f"broadcasts {message.flat.numel()} bytes of buffers", not is_root)
            self._wait(self._group.broadcast([message.flat], self._options))
            if not is_root:
                message.unpack()

    def _find_buffers(self) -> None:
        ignored = self._ddp.parameters_to_ignore
        self._buffers = [buffer for name, buffer in self._ddp.module.named_buffers() if name not in ignored]
        self._places = self._places_now()
        devices = dict.fromkeys(buffer.device for buffer in self._buffers)
        # A program that evaluates in inference mode may train after it.
        with torch.inference_mode(False):
            self._messages = [
                _Message([buffer for buffer in self._buffers if buffer.device == device])
                for device in devices
            ]

    def _places_now(self) -> list[int]:
        return [*map(_address_of, self._buffers), *map(_size_of, self._buffers)]


class _Message:
    """Some buffers on one device, and memory that has room for all of them."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        offsets, end = [], 0
        for buffer in buffers:
            offsets.append(end)
            size = buffer.numel() * buffer.element_size()
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.flat = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device)
        # By dtype, the parts of the message and the buffers. A buffer's data has a version counter of its own: that the
        # values come from elsewhere is no change that a backward must hear of.
        self._copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for buffer, offset in zip(buffers, offsets, strict=True):
            part = self.flat[offset : offset + buffer.numel() * buffer.element_size()]
            parts, sources = self._copies.setdefault(buffer.dtype, ([], []))
            parts.append(part.view(buffer.dtype).view(buffer.shape))
            sources.append(buffer.data)

    def pack(self) -> None:
        for parts, buffers in self._copies.values():
            foreach_copy(parts, buffers)

    def unpack(self) -> None:
        for parts, buffers in self._copies.values():
            foreach_copy(buffers, parts)


class _Tables:
    """The modules and buffers that a module consists of, to notice when others have taken their places.

    Called in each step, so the loops are C's, and each table is looked at once: there are hundreds, in no cache.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        tables = [table for part in module.modules() for table in (part._modules, part._buffers)]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._values = self._found()

    def changed(self) -> bool:
        if any(self._empty):
            return True
        found = self._found()
        return len(found) != len(self._values) or not all(map(operator.is_, found, self._values))

    def _found(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._filled))]
