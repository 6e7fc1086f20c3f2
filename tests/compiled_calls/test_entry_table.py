"""Several entries a function: their order, the limit, threads, and what is said about them."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

import gradsplit
from gradsplit import config
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction


def add_number(x: torch.Tensor, n: int, flag: bool = False) -> torch.Tensor:
    return x + n if flag else x - n


def compile_eager(function, **options):
    """Static: an integer that differs would become symbolic, and one entry serve many."""
    return CompiledFunction(function, lambda graph, inputs: graph.module, dynamic=False, **options)


def numbers(compiled: CompiledFunction) -> list[int]:
    """What each entry was captured for, in the order of the table."""
    return [
        next(n for n in range(10) if type(entry.check(torch.zeros(1), n, False)) is list)
        for entry in compiled.entries
    ]


def test_entries_are_checked_most_recently_used_first():
    compiled = compile_eager(add_number)
    for n in (1, 2, 3):
        compiled(torch.zeros(1), n)
    assert numbers(compiled) == [3, 2, 1]
    compiled(torch.zeros(1), 1)
    assert numbers(compiled) == [1, 3, 2]
    compiled(torch.zeros(1), 3)
    assert numbers(compiled) == [3, 1, 2]


def test_the_limit_names_the_guard_that_kept_failing(caplog):
    compiled = compile_eager(add_number, cache_limit=5)
    with caplog.at_level(logging.WARNING, logger="gradsplit.compile_core.capture"):
        for n in range(3):
            assert compiled(torch.zeros(1), n).item() == -n
        assert compiled(torch.zeros(1, 1), 2).item() == -2
        for n in range(10, 14):
            assert compiled(torch.zeros(1, 1), n).item() == -n
    assert len(compiled.entries) == 5
    (record,) = caplog.records
    message = record.getMessage()
    assert "captured 5 times (the limit)" in message
    assert "most often, 4 times: not: n == 10" in message


def test_reset_forgets_the_limit(caplog):
    compiled = compile_eager(add_number, cache_limit=1)
    for n in range(3):
        compiled(torch.zeros(1), n)
    compiled.reset()
    assert not compiled.entries
    compiled(torch.zeros(1), 7)
    assert numbers(compiled) == [7]


def test_the_limit_of_the_configuration():
    compiled = compile_eager(add_number)
    with config.patch(cache_size_limit=2):
        for n in range(4):
            compiled(torch.zeros(1), n)
    assert len(compiled.entries) == 2


def test_recompilations_are_logged_with_their_reason(caplog):
    compiled = compile_eager(add_number)
    with caplog.at_level(logging.INFO, logger="gradsplit.compile_core.capture"):
        compiled(torch.zeros(1), 1)
        compiled(torch.zeros(2), 1)
    (message,) = (text for text in caplog.messages if "recompiled" in text)
    assert "recompiled because not: x is a Tensor of float32[1]" in message


def test_threads_share_one_capture():
    graphs = []

    def slow_backend(module, inputs):
        graphs.append(module)
        time.sleep(0.05)
        return module

    compiled = gradsplit.compile(add_number, backend=slow_backend)
    barrier = threading.Barrier(4)
    results = []

    def work():
        barrier.wait()
        results.append(compiled(torch.zeros(1), 1).item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [-1.0] * 4
    assert len(graphs) == len(compiled.entries) == 1


def test_a_call_that_fits_does_not_wait_for_a_capture():
    entered, leave = threading.Event(), threading.Event()

    def backend(module, inputs):
        if inputs[0].dim() == 2:
            entered.set()
            assert leave.wait(20)
        return module

    compiled = gradsplit.compile(add_number, backend=backend)
    compiled(torch.zeros(1), 1)
    compiled(torch.zeros(1), 2)
    thread = threading.Thread(target=lambda: compiled(torch.zeros(1, 1), 1))
    thread.start()
    assert entered.wait(20)
    try:
        assert compiled(torch.zeros(1), 1).item() == -1  # of the entry that is not in front
    finally:
        leave.set()
        thread.join()
    assert len(compiled.entries) == 3


@pytest.mark.parametrize("workers", [4])
def test_threads_that_use_and_add_entries_lose_none(workers):
    compiled = compile_eager(add_number)
    failures = []

    def work(seed: int) -> None:
        for step in range(60):
            n = (seed + step * (seed + 1)) % 6
            if compiled(torch.zeros(1), n).item() != -n:
                failures.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(numbers(compiled)) == list(range(6))
