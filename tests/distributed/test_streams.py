"""The streams that are current, and works that end on one of them."""

from __future__ import annotations

import pytest
import torch

from gradsplit.distributed.collectives.work import StreamWork
from gradsplit.distributed.streams import current_stream

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
_CYCLES = 2_000_000_000


def test_the_current_stream_is_torchs() -> None:
    other = torch.cuda.Stream(DEVICE)
    before = current_stream(DEVICE)
    assert before == torch.cuda.current_stream(DEVICE) and before is current_stream(DEVICE)
    with torch.cuda.stream(other):
        assert current_stream(DEVICE) == other
    assert current_stream(DEVICE) is before


@pytest.mark.parametrize("waits", ["owner", "other", "nobody"])
def test_memory_is_free_once_its_stream_waits(waits: str) -> None:
    side, third = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    torch.cuda.empty_cache()
    # To load a kernel is to wait for all streams.
    kept = torch.empty(2**24, dtype=torch.uint8, device=DEVICE).fill_(0)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    address = kept.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_CYCLES)
        kept.fill_(1)
    work = StreamWork(side.record_event(), side, [kept])
    del kept
    if waits == "owner":
        work.wait()
    elif waits == "other":
        with torch.cuda.stream(third):
            work.wait()
    assert not work.is_completed()
    del work
    taken = torch.empty(2**24, dtype=torch.uint8, device=DEVICE)
    # Another's memory would be written to while it is in use.
    assert (taken.data_ptr() == address) == (waits == "owner")
    torch.cuda.synchronize()
