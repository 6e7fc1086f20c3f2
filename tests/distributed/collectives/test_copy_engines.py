"""Means by copies: ranks are threads here, which share all memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradsplit.distributed.collectives import copy_engines
from gradsplit.distributed.collectives.copy_engines import average, find_engines
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer, part_of
from tests.distributed.collectives.thread_operations import ThreadOperations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 64, 65, 1000, 6400])
def test_every_rank_has_the_mean(numel: int, ranks: int, dtype: torch.dtype) -> None:
    buffers = [torch.randint(-8, 8, (numel,)).to(dtype) for _ in range(ranks)]
    # The second mean is one of equal values.
    expected = torch.stack(buffers).double().mean(0).to(dtype)
    barrier = Barrier(ranks)

    def run(rank: int) -> None:
        buffer = SharedBuffer(buffers, rank)
        for _ in range(2):
            average(buffer.mine, buffer, torch.empty_like(buffer.part), None, ThreadOperations(barrier))

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    for buffer in buffers:
        torch.testing.assert_close(buffer, expected)


def test_a_rank_may_have_its_summand_elsewhere() -> None:
    buffers, summand = [torch.full((100,), float(rank)) for rank in range(3)], torch.full((100,), 40.0)
    barrier = Barrier(3)

    def run(rank: int) -> None:
        buffer = SharedBuffer(buffers, rank)
        scratch = torch.empty_like(buffer.part)
        flat, held = (summand, torch.empty_like(summand)) if rank == 1 else (buffer.mine, None)
        average(flat, buffer, scratch, held, ThreadOperations(barrier))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert [set(memory.tolist()) for memory in (*buffers, summand)] == [{14.0}, {1.0}, {14.0}, {14.0}]


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_parts_lie_one_behind_the_other(numel: int, ranks: int) -> None:
    end = 0
    for rank in range(ranks):
        begin, next_end = part_of(numel, ranks, rank)
        assert begin == end and begin <= next_end <= begin + part_of(numel, ranks, 0)[1]
        end = next_end
    assert end == numel


TRIALS = ["try_alone", "try_to_share", "try_to_average"]


class Tried:
    """Engines that fail in one of the trials."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.tried: list[str] = []

    def __call__(self, *where: object) -> Tried:
        return self

    def __getattr__(self, name: str) -> Callable[[], None]:
        def trial() -> None:
            self.tried.append(name)
            if name == self.failing:
                raise RuntimeError(f"cannot {name}")

        return trial


@pytest.mark.parametrize("failing", ["", *TRIALS])
@pytest.mark.parametrize("is_mine", [True, False])
def test_all_ranks_leave_engines_that_fail_on_one(
    failing: str, is_mine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Tried(failing if is_mine else "")

    def gather(found: list[str], mine: str, group: object) -> None:
        others = f"RuntimeError: cannot {failing}" if engines.tried[-1] == failing and not is_mine else ""
        found[:] = [mine, others]

    group = cast(dist.ProcessGroup, SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(copy_engines, "reason_against", lambda group, device: "")
    monkeypatch.setattr(copy_engines, "CopyEngines", engines)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    found, against = find_engines(group, torch.device("cuda", 0))
    assert against == (failing and f"RuntimeError: cannot {failing}")
    assert found is (None if failing else engines)
    # A rank that failed in one makes nobody wait in the next.
    passed = TRIALS[: TRIALS.index(failing) + 1] if failing else [*TRIALS, "leave_trials"]
    assert engines.tried == passed
