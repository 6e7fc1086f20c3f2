"""16-bit values that travel as such: ranks are threads here, which share all memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from distributed.collectives.copy_engines import average
from distributed.collectives.landed_mean import BLOCK
from distributed.collectives.narrow_average import NarrowExchange
from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer
from tests.distributed.collectives.thread_operations import ThreadOperations


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("narrow_ranks", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("narrow_numel", [16, BLOCK, 2 * BLOCK + 48])
def test_both_ranks_have_the_mean(narrow_numel: int, narrow_ranks: tuple[int, ...], elsewhere: bool) -> None:
    numel, barrier = narrow_numel + 200, Barrier(2)
    values = [torch.randint(-8, 8, (numel,)).float() for _ in range(2)]
    expected = (values[0] + values[1]) / 2
    buffers, told = [torch.full((numel,), 9.0), values[1].clone()], [0, 0]
    if not elsewhere:
        buffers[0] = values[0].clone()
    flats = [values[0].clone() if elsewhere else buffers[0], buffers[1]]
    part = NarrowPart(narrow_numel, torch.bfloat16)

    def run(rank: int) -> None:
        own = flats[rank][:narrow_numel]
        if rank in narrow_ranks:
            # At the beginning of where the means come to lie.
            exact = own.bfloat16()
            own = own.view(torch.bfloat16)[:narrow_numel].copy_(exact)
        buffer, operations = SharedBuffer(buffers, rank, part), ThreadOperations(barrier, rank, told)
        exchange = NarrowExchange(buffer, own, torch.empty_like(own), operations)
        held = torch.empty_like(buffer.mine) if flats[rank] is not buffer.mine else None
        average(flats[rank], buffer, torch.empty_like(buffer.part), held, operations, exchange)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    for flat in flats:
        torch.testing.assert_close(flat, expected, rtol=0, atol=0)
    assert not elsewhere or bool((buffers[0] == 9).all())
    assert told == [2 if 1 in narrow_ranks else 4, 2 if 0 in narrow_ranks else 4]
