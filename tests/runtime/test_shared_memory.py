"""One memory for the temporaries of all recordings: in which order replays use it, and that results lie elsewhere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.runtime import shared_memory
from gradsplit.compile_core.runtime.shared_memory import SharedMemory

MIB = 1 << 20


class Device:
    """Stands in for a GPU: a log of what its allocator and its streams are told.

    Attributes:
        stream: the current one.
        segments: of the allocator, what there is of shared memory.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = 1
        self.segments: list[dict[str, int]] = []

    def event(self) -> Any:
        device = self

        class Event:
            def record(self, stream: Stream) -> None:
                device.log.append(f"{stream.number} records")

        return Event()

    def current_stream(self, index: int) -> Stream:
        return Stream(self, self.stream)

    def replay(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(f"{self.stream} runs {name}")


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number, self.cuda_stream = device, number, number

    def wait_event(self, event: Any) -> None:
        self.device.log.append(f"{self.number} waits")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool, include_traces: made.segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(shared_memory, "current_raw_stream", lambda index: made.stream)
    for name in ("begin_allocating", "end_allocating", "release_pool"):
        monkeypatch.setattr(
            shared_memory, name, lambda index, pool, name=name: made.log.append(f"{name} {index} {pool}")
        )
    return made


def test_replays_of_one_stream_do_not_wait(device: Device) -> None:
    memory = SharedMemory(0)
    device.log.clear()
    for name in ("forward", "backward"):
        memory.in_turn(device.replay(name))()
    assert device.log == ["1 runs forward", "1 records", "1 runs backward", "1 records"]


def test_a_replay_on_another_stream_waits_for_the_one_before(device: Device) -> None:
    memory = SharedMemory(0)
    device.log.clear()
    forward, backward = (memory.in_turn(device.replay(name)) for name in ("forward", "backward"))
    forward()
    device.stream = 2
    backward()
    backward()
    device.stream = 1
    forward()
    assert [line for line in device.log if "records" not in line] == [
        "1 runs forward",
        *("2 waits", "2 runs backward", "2 runs backward"),
        *("1 waits", "1 runs forward"),
    ]


def test_replays_of_several_threads_take_turns(device: Device) -> None:
    memory = SharedMemory(0)
    running = threading.Lock()

    def replay() -> None:
        assert running.acquire(blocking=False), "two replays at once"
        device.log.append("runs")
        running.release()

    replays = [memory.in_turn(replay) for _ in range(8)]
    device.log.clear()
    threads = [threading.Thread(target=lambda call=call: [call() for _ in range(50)]) for call in replays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.log == ["runs", "1 records"] * 400


def test_a_capture_is_a_turn(device: Device) -> None:
    """Of all threads: torch writes where recordings draw from before a capture, as before a replay."""
    memory = SharedMemory(0)
    replay = memory.in_turn(device.replay("a"))
    replay()
    device.log.clear()
    thread = threading.Thread(target=replay)
    with memory.turn_of(Stream(device, 7)):
        thread.start()
        thread.join(0.05)
        device.log.append("captured")
    thread.join()
    assert device.log == ["7 waits", "captured", "7 records", "1 waits", "1 runs a", "1 records"]


def test_what_fails_while_it_was_entered_leaves_it(device: Device) -> None:
    memory = SharedMemory(3)
    device.log.clear()
    memory.enter()
    memory.leave()
    memory.leave()
    assert device.log == [
        f"{name} 3 (0, 7)" for name in ("begin_allocating", "end_allocating", "release_pool")
    ]


def test_a_workspace_lies_beside_the_piece_that_recordings_share(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = device.log

    class Piece:
        def __init__(self, size: int) -> None:
            log.append(f"allocates {size}")

        def __del__(self) -> None:
            log.append("frees it")

    monkeypatch.setattr(shared_memory, "piece_of", Piece)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: log.append("workspace"))
    memory = SharedMemory(0)
    log.clear()
    entered, left = ["begin_allocating 0 (0, 7)"], ["end_allocating 0 (0, 7)", "release_pool 0 (0, 7)"]
    for size in (5, 3):
        memory.make_room(size)
        assert log == [*entered, f"allocates {size}", "frees it", *left]
        log.clear()
    memory.have_workspace()
    assert log == [*entered, "allocates 5", "workspace", "frees it", *left]


def test_there_is_one_a_gpu_for_as_long_as_it_is_needed(device: Device) -> None:
    first = shared_memory.shared_memory(0)
    assert first is not None
    assert shared_memory.shared_memory(0) is first and shared_memory.shared_memory(1) is not first
    replay = first.in_turn(device.replay("forward"))
    del first
    gc.collect()
    released = "release_pool 0 (0, 7)"
    assert released not in device.log
    del replay
    gc.collect()
    assert device.log.count(released) == 1


def test_allocators_without_pools_have_none(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert shared_memory.shared_memory(0) is None


def test_a_result_in_it_is_an_error(device: Device) -> None:
    memory, result = SharedMemory(0), torch.ones(8)[4:]
    memory.check_apart([result, None])
    segment = {"device": 0, "address": result.untyped_storage().data_ptr() - 16, "total_size": 64}
    device.segments.append({**segment, "device": 1})
    memory.check_apart([result])
    device.segments.append(segment)
    with pytest.raises(InternalError, match="lies in memory that other recordings use"):
        memory.check_apart([None, result])


class Wide(nn.Module):
    """Temporaries of a hundred times what goes in and out, some by torch's kernels and some by ours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.outer = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x)).cumsum(0)
        return self.outer(torch.softmax(hidden, 0))


@pytest.fixture
def no_private_memory() -> Iterator[None]:
    """Nothing of earlier tests is held, nor is anything afterwards."""
    gradsplit.reset()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gradsplit.reset()
    gc.collect()


def held_mib() -> int:
    """What the allocator cannot give back."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() // MIB


@pytest.mark.gpu
@pytest.mark.usefixtures("no_private_memory")
def test_recordings_of_many_sizes_hold_the_temporaries_of_one() -> None:
    model = Wide(8192).cuda().requires_grad_(False)
    compiled = gradsplit.compile(model, mode="reduce-overhead", dynamic=False)
    held = []
    for rows in (4096, 4000, 3800, 3600):
        x = torch.randn(rows, 64, device="cuda")
        for _ in range(3):
            found = compiled(x)
        torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-4)
        del found
        held.append(held_mib())
    # Each has two temporaries of 128 MiB at a time or so.
    assert held[-1] - held[0] < 64, held


@pytest.mark.gpu
@pytest.mark.usefixtures("no_private_memory")
def test_a_backward_computes_where_its_forward_did() -> None:
    """What is recorded holds what is saved, the gradients, and the greater of two groups of temporaries."""
    modules = [Wide(8192).cuda() for _ in range(3)]
    held = [held_mib()]
    calls = [gradsplit.compile(module, mode="reduce-overhead") for module in modules]
    x = torch.randn(4096, 64, device="cuda")
    saved = []
    for module, call in zip(modules, calls, strict=True):
        for _ in range(4):
            module.zero_grad()
            call(x).square().mean().backward()
        module.zero_grad()
        held.append(held_mib())
        saved.append(held[-1] - held[-2])
    # The first one pays for the temporaries of all.
    assert saved[1] <= saved[0] - 128 and saved[2] <= saved[1] + 8, held


@pytest.mark.gpu
@pytest.mark.usefixtures("no_private_memory")
def test_the_memory_goes_with_the_last_recording() -> None:
    before = held_mib()
    compiled = gradsplit.compile(lambda x: (x @ x.T).cumsum(0).sum(1), mode="reduce-overhead")
    x = torch.randn(4096, 64, device="cuda")
    for _ in range(3):
        compiled(x)
    assert held_mib() > before + 64
    del compiled
    gradsplit.reset()
    del x
    gc.collect()
    assert held_mib() <= before + 48, "beside what cuBLAS keeps for a stream"


@pytest.mark.gpu
def test_results_of_all_recordings_outlast_the_replays_of_others() -> None:
    """Several modules and sizes in turn, with results, gradients and graphs that are kept over steps."""
    torch.manual_seed(3)
    plain = [Wide(512).cuda().double(), Wide(256).cuda().double()]
    ours = [Wide(512).cuda().double(), Wide(256).cuda().double()]
    for one, other in zip(plain, ours, strict=True):
        other.load_state_dict(one.state_dict())
    compiled = [gradsplit.compile(module, mode="reduce-overhead", dynamic=False) for module in ours]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    waiting: list[list[torch.Tensor]] = [[], []]
    for step in range(24):
        number = step % 2
        x = torch.randn((64, 96, 80)[step % 3], 64, device="cuda", dtype=torch.float64)
        stream = streams[step // 2 % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = []
            for side, call in enumerate((plain[number], compiled[number])):
                result = call(x)
                loss = result.square().sum() + result.sum()
                loss.backward(retain_graph=step % 4 == 3)
                if step % 4 == 3:
                    loss.backward()
                if step % 5 == 4:
                    waiting[side].append(call(x).sum())  # its backward comes later
                elif waiting[side]:
                    waiting[side].pop().backward()
                results.append(result.detach())
            kept.append((results[0], results[1]))
        torch.cuda.current_stream().wait_stream(stream)
        if step % 6 == 5:
            for one, other in zip(plain, ours, strict=True):
                for a, b in zip(one.parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(b.grad, a.grad)
                one.zero_grad()
                other.zero_grad()
    for expected, found in kept:
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_threads_on_streams_of_their_own() -> None:
    torch.manual_seed(4)
    modules = [Wide(2048).cuda() for _ in range(3)]
    compiled = [gradsplit.compile(module, mode="reduce-overhead") for module in modules]
    xs = [torch.randn(512, 64, device="cuda") for _ in modules]
    expected = [module(x).detach() for module, x in zip(modules, xs, strict=True)]
    with torch.no_grad():
        for call, x in zip(compiled, xs, strict=True):
            for _ in range(3):
                call(x)
    torch.cuda.synchronize()
    failures: list[str] = []

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(200):
                found = compiled[number](xs[number])
                if not torch.allclose(found, expected[number], rtol=1e-3, atol=1e-4):
                    failures.append(f"thread {number}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_allocator_as_it_was(caplog: Any) -> None:
    """It fails behind a temporary, with shared memory entered."""

    def program(x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ x).cumsum(0)
        return torch.linalg.inv(hidden + torch.eye(8, device="cuda") * 99).cumsum(1)

    compiled = gradsplit.compile(program, mode="reduce-overhead")
    x = torch.randn(8, 8, device="cuda")
    for _ in range(4):
        torch.testing.assert_close(compiled(x), program(x))
    memory = shared_memory.shared_memory(0)
    assert memory is not None and not memory._is_entered
    before = torch.cuda.memory_reserved()
    large = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
