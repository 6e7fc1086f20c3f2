"""Means by copies: ranks are threads here, which share all memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.collectives.copy_engines import (
    SharedBuffer,
    _forbidding_setting,
    _part,
    _Place,
    _reason_of,
    average,
    average_elsewhere,
    part_numel,
)


def add_and_divide(part: torch.Tensor, other: torch.Tensor, divisor: int) -> None:
    part.copy_((part.double() + other.double()) / divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 64, 65, 1000, 6400])
def test_every_rank_has_the_mean(numel: int, ranks: int, dtype: torch.dtype) -> None:
    buffers = [torch.randint(-8, 8, (numel,)).to(dtype) for _ in range(ranks)]
    # The second mean is one of equal values.
    expected = torch.stack(buffers).double().mean(0).to(dtype)
    barrier = Barrier(ranks)

    def run(rank: int) -> None:
        buffer, scratch = SharedBuffer(buffers, rank), torch.empty(part_numel(numel, ranks), dtype=dtype)
        for _ in range(2):
            average(buffer, scratch, lambda: barrier.wait(30), add_and_divide)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    for buffer in buffers:
        torch.testing.assert_close(buffer, expected)


def test_a_rank_may_have_its_summand_elsewhere() -> None:
    buffers, summand = [torch.full((100,), float(rank)) for rank in range(3)], torch.full((100,), 40.0)
    barrier = Barrier(3)

    def run(rank: int) -> None:
        buffer, scratch = SharedBuffer(buffers, rank), torch.empty(part_numel(100, 3))
        if rank == 1:
            average_elsewhere(summand, buffer, scratch, lambda: barrier.wait(30), add_and_divide)
        else:
            average(buffer, scratch, lambda: barrier.wait(30), add_and_divide)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert [set(memory.tolist()) for memory in (*buffers, summand)] == [{14.0}, {1.0}, {14.0}, {14.0}]


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_parts_lie_one_behind_the_other(numel: int, ranks: int) -> None:
    end = 0
    for rank in range(ranks):
        begin, next_end = _part(numel, ranks, rank)
        assert begin == end and begin <= next_end <= begin + part_numel(numel, ranks)
        end = next_end
    assert end == numel


HERE = _Place("host", 0, frozenset({1, 2}), "nccl")
THERE = _Place("host", 1, frozenset({0, 2}), "nccl")


@pytest.mark.parametrize(
    ("name", "value", "is_forbidden"),
    [("NCCL_P2P_DISABLE", "1", True), ("NCCL_P2P_DISABLE", "0", False), ("NCCL_P2P_LEVEL", "LOC", True)],
)
def test_settings_of_nccl_hold(
    name: str, value: str, is_forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert _forbidding_setting() == (f"{name}={value}" if is_forbidden else "")


def test_one_rank_has_nothing_to_copy() -> None:
    assert _reason_of([HERE]) == "there is one rank"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (THERE, ""),
        (_Place("host", 1, frozenset({0}), "gloo"), "not NCCL's"),
        (_Place("host", 1, frozenset({0}), "nccl", "NCCL_P2P_DISABLE=1"), "NCCL_P2P_DISABLE=1 is set"),
        (_Place("elsewhere", 1, frozenset({0}), "nccl"), "several hosts"),
        (_Place("host", 0, frozenset({1}), "nccl"), "sees its GPU alone"),
        (_Place("host", 3, frozenset({0}), "nccl"), "GPU 0 does not reach the memory of GPU 3"),
        (_Place("host", 1, frozenset(), "nccl"), "GPU 1 does not reach the memory of GPU 0"),
    ],
)
def test_which_ranks_can(other: _Place, reason: str) -> None:
    found = _reason_of([HERE, other])
    assert reason in found and bool(reason) == bool(found)
