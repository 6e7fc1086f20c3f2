"""16-bit values that travel as such: ranks are threads here, which share all memory."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from distributed.collectives.copy_engines import average
from distributed.collectives.copy_rows import copy_rows
from distributed.collectives.landed_mean import BLOCK
from distributed.collectives.narrow_average import NarrowExchange
from distributed.collectives.shared_buffers import NarrowPart, SharedBuffer


def copy_rows_here(target: int, pitch_bytes: int, source: int, row_bytes: int, rows: int) -> None:
    for row in range(rows):
        ctypes.memmove(target + row * pitch_bytes, source + row * row_bytes, row_bytes)


class Rank:
    """One of two ranks: its buffer, and what the kernels would do."""

    def __init__(self, rank: int, buffers: list[torch.Tensor], told: list[int], barrier: Barrier) -> None:
        self.rank, self.buffers, self.told, self.barrier = rank, buffers, told, barrier

    def average_landed(self, means: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> None:
        """As the kernel does, block by block."""
        landed = means.clone()
        if self.told[self.rank] == 2:
            halves = means.view(dtype)
            for begin in range(0, means.numel(), BLOCK):
                end = min(begin + BLOCK, means.numel())
                landed[begin:end] = halves[2 * begin : begin + end]
        means.copy_((landed + own) / 2)

    def add_and_divide(self, part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
        part.copy_((part + other) / divisor)

    def tell(self, number: int) -> None:
        self.told[1 - self.rank] = number

    def run(self, flat: torch.Tensor, part: NarrowPart, own: torch.Tensor) -> None:
        buffer = SharedBuffer(self.buffers, self.rank, part)
        aside = torch.empty_like(own)
        exchange = NarrowExchange(buffer, own, aside, copy_rows_here, self.tell, self.average_landed)
        average(
            flat,
            buffer,
            torch.empty_like(buffer.part),
            lambda: self.barrier.wait(30),
            self.add_and_divide,
            exchange,
        )


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
        Rank(rank, buffers, told, barrier).run(flats[rank], part, own)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    for flat in flats:
        torch.testing.assert_close(flat, expected, rtol=0, atol=0)
    assert not elsewhere or bool((buffers[0] == 9).all())
    assert told == [2 if 1 in narrow_ranks else 4, 2 if 0 in narrow_ranks else 4]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (33, BLOCK)])
def test_rows_are_copied_to_where_they_lie_apart(shape: tuple[int, int]) -> None:
    height, width = shape
    source = torch.randn(shape, device="cuda").bfloat16()
    target = torch.zeros(height, 2 * width, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream
    copy_rows(target.data_ptr(), 4 * width, source.data_ptr(), 2 * width, height, stream)
    assert torch.equal(target[:, :width], source)
    assert not target[:, width:].any()
