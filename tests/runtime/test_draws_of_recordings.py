"""Random numbers of a recording that is replayed as soon as it is made, whatever the GPU runs first of two streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsplit.compile_core.runtime import cuda_graphs
from gradsplit.compile_core.runtime.cuda_graphs import CudaRecorder


class Gpu:
    """What torch does with the place from which recordings draw. Work of a stream is done as late as may be.

    Attributes:
        current: the stream to which work is given.
        place: what a recording would draw from now.
    """

    def __init__(self) -> None:
        self.current = Stream()
        self.place = 0

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_place(self, value: int) -> None:
        self.place = value


class Stream:
    def __init__(self, *_: Any) -> None:
        self.given: list[Callable[[], None]] = []

    def wait_stream(self, other: Stream) -> None:
        other.finish()

    def finish(self) -> None:
        while self.given:
            self.given.pop(0)()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()

    class Graph:
        drawn: int

        def capture_begin(self, **_: Any) -> None:
            self._stream = made.current
            self._stream.given.append(lambda: made.set_place(0))

        def capture_end(self) -> None: ...

        def pool(self) -> None: ...

        def replay(self) -> None:
            made.set_place(42)
            self._stream.finish()
            Graph.drawn = made.place

    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    for name, value in {
        "get_allocator_backend": lambda: "cudaMallocAsync",
        "Stream": Stream,
        "CUDAGraph": Graph,
        "default_generators": [generator],
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "device": lambda device: contextlib.nullcontext(),
        "stream": made.on,
        "current_stream": lambda: made.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    cuda_graphs._idle_streams.cache_clear()
    yield made
    cuda_graphs._idle_streams.cache_clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_replay_draws_after_the_capture_has_set_where_from(gpu: Gpu, fails: bool) -> None:
    def program(inputs: list[Any]) -> list[Any]:
        if fails and len(inputs) > 1:
            raise ValueError
        return inputs

    recorder = CudaRecorder(torch.device("cuda", 0))
    replay, _ = recorder.record(program, [torch.ones(1)])
    if fails:
        with pytest.raises(ValueError):
            recorder.record(program, [torch.ones(1)] * 2)
    replay()
    assert gpu.place == 42


@pytest.mark.gpu
def test_a_replay_draws_what_the_program_would(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(8, device=device)
    recorder = CudaRecorder(device)

    def drawn_late(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.cuda._sleep(400_000_000)
        return [inputs[0] + torch.rand(8, device=device)]

    def begin() -> None:
        torch.manual_seed(7)
        torch.rand(8, device=device)

    begin()
    (expected,) = drawn_late([x])
    emptied, stream = torch.cuda.empty_cache, torch.cuda.Stream(device)
    monkeypatch.setattr(cuda_graphs, "_idle_streams", lambda index: [stream])

    def busy() -> None:
        """The last that is done before a capture: its stream is late by 50 ms; the program sleeps longer."""
        emptied()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)

    monkeypatch.setattr(torch.cuda, "empty_cache", busy)
    begin()
    replay, (found,) = recorder.record(drawn_late, [x])
    replay()
    assert found.tolist() == expected.tolist()
