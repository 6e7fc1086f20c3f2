"""What ranks average of a buffer."""

from __future__ import annotations

import torch

from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer
from distributed.gradients.bucket_buffers import _views_of


def test_parts_lie_behind_the_narrow_part() -> None:
    memories = [torch.arange(300.0) + 1000 * rank for rank in range(2)]
    first, second = (SharedBuffer(memories, rank, NarrowPart(100, torch.bfloat16)) for rank in range(2))
    assert first.narrow_memory.tolist() == [*range(100)]
    assert (first.part[0], first.part[-1], len(first.part)) == (100, 227, 128)
    assert [part.tolist() for part in first.part_on_others] == [(first.part + 1000).tolist()]
    assert (second.part[0], second.part[-1], len(second.part)) == (1228, 1299, 72)
    assert not SharedBuffer(memories, 1, NarrowPart(300, torch.bfloat16)).part_on_others


def test_a_buffer_keeps_no_view_of_its_own_memory() -> None:
    # ``BucketBuffers`` would give the bucket other memory, as it does where a program has views.
    memories = [torch.zeros(300), torch.zeros(300)]
    buffer = SharedBuffer(memories, 0, NarrowPart(100, torch.bfloat16))
    before = _views_of(memories[0])
    assert buffer.narrow_memory.numel() + buffer.part.numel() + len(buffer.part_on_others) == 229
    assert _views_of(memories[0]) == before
