"""Whose memory works share."""

from __future__ import annotations

import torch

from gradsplit.distributed.collectives.copy_engines import Scratch


def test_works_share_memory_while_one_holds_it() -> None:
    scratch, stream = Scratch(), object()
    held, first = scratch.take(torch.zeros(100), stream)
    again, second = scratch.take(torch.zeros(60), stream)
    assert again is held and (first.shape, second.shape) == ((100,), (60,))
    assert first.data_ptr() == second.data_ptr() == held.data_ptr()
    # Nobody keeps it but the works.
    del held, again, first, second
    assert scratch.take(torch.zeros(60), stream)[0].numel() == 60


def test_what_is_too_small_is_not_shared() -> None:
    scratch, stream = Scratch(), object()
    small, _ = scratch.take(torch.zeros(10), stream)
    large, part = scratch.take(torch.zeros(20), stream)
    assert large is not small and part.numel() == 20
    assert scratch.take(torch.zeros(10), stream)[0] is large


def test_dtypes_and_streams_have_their_own() -> None:
    scratch, stream = Scratch(), object()
    wide, _ = scratch.take(torch.zeros(10), stream)
    narrow, part = scratch.take(torch.zeros(10, dtype=torch.bfloat16), stream)
    assert part.dtype == torch.bfloat16 and narrow.data_ptr() != wide.data_ptr()
    assert scratch.take(torch.zeros(10), object())[0] is not wide
