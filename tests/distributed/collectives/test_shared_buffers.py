"""What ranks average of a buffer."""

from __future__ import annotations

import torch

from gradsplit.distributed.collectives.shared_buffers import SharedBuffer
from gradsplit.distributed.gradients.bucket_buffers import _views_of


def test_a_buffer_keeps_no_view_of_its_own_memory() -> None:
    # ``BucketBuffers`` would give the bucket other memory, as it does where a program has views.
    memories = [torch.zeros(300), torch.zeros(300)]
    buffer = SharedBuffer(memories, 0)
    before = _views_of(memories[0])
    assert buffer.part.numel() + len(buffer.part_on_others) == 193
    assert _views_of(memories[0]) == before
