"""Memory for the temporaries of all recordings of a GPU, so that each further recording costs its results only.

A recording uses fixed addresses for as long as it lives. What it computes on the way is of no use between two replays,
so recordings may use the same addresses for it, as long as their replays do not run at once. Two rules make that right:

* *Replays take turns*, in the order in which they are started: on another stream, the GPU waits for the replay before.
* *No result lies here.* What a program returns, or keeps for its backward, must outlast the replays of others. Programs
  of ours say of each allocation which it is (``share_temporaries``), others have all memory of their own, and where
  results lie is looked at after each capture.

A capture allocates from a pool of its own; between ``enter`` and ``leave`` its thread allocates from this one, whose
free memory is what earlier captures left. Torch's CUDA graph trees share results, too, and must then know which replay
may follow which.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.torch_facts.cuda import (
    begin_allocating,
    current_raw_stream,
    end_allocating,
    release_pool,
)


class SharedMemory:
    """The one of a GPU; it is there until no recording needs it.

    Args:
        index: the GPU's.

    Attributes:
        is_recorded_in: whether any recording was begun.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._pool = torch.cuda.graph_pool_handle()
        self._is_entered = False
        self.is_recorded_in = False
        self._room_bytes = 0
        # Torch keeps a pool until each ``begin_allocating`` has been followed by its ``release_pool``.
        begin_allocating(index, self._pool)
        end_allocating(index, self._pool)
        weakref.finalize(self, release_pool, index, self._pool).atexit = False
        self._turn = threading.Lock()
        self._last_stream: Any = None
        self._last_raw_stream: int | None = None
        self._last_replay = torch.cuda.Event()

    def enter(self) -> None:
        """What this thread allocates lies here from now on."""
        begin_allocating(self._index, self._pool)
        self._is_entered = True

    def leave(self) -> None:
        """What this thread allocates lies where it did before ``enter``. Without one, nothing happens."""
        if self._is_entered:
            self._is_entered = False
            end_allocating(self._index, self._pool)
            release_pool(self._index, self._pool)

    def make_room(self, size: int) -> None:
        """See ``TemporaryMemory``."""
        self._room_bytes = max(self._room_bytes, size)
        self.enter()
        try:
            piece_of(size)
        finally:
            self.leave()

    def have_workspace(self) -> None:
        """Torch gives cuBLAS 32 MiB at the first product of each thread on a stream, for good: here, not amidst what
        one recording computes, and beside the piece that recordings share."""
        self.enter()
        piece = piece_of(self._room_bytes)
        torch.cuda.current_blas_handle()
        del piece
        self.leave()

    def apart(self, program: str) -> Collection[str]:
        return ()

    def in_turn(self, replay: Callable[[], None]) -> Callable[[], None]:
        """A replay on the current stream, which waits for the one before and lets the next one wait for it."""

        def replay_in_turn() -> None:
            with self._turn:
                stream = current_raw_stream(self._index)
                if stream != self._last_raw_stream:
                    current = torch.cuda.current_stream(self._index)
                    if self._last_stream is not None:
                        current.wait_event(self._last_replay)
                    self._last_stream, self._last_raw_stream = current, stream
                try:
                    replay()
                finally:
                    # Not the stream is waited for: somebody may be capturing it by then.
                    self._last_replay.record(self._last_stream)

        return replay_in_turn

    @contextmanager
    def turn_of(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """What a stream is given inside has a turn of its own among the replays."""
        with self._turn:
            if self._last_stream is not None:
                stream.wait_event(self._last_replay)
            try:
                yield
            finally:
                self._last_stream, self._last_raw_stream = stream, stream.cuda_stream
                self._last_replay.record(stream)

    def check_apart(self, results: Iterable[Any]) -> None:
        """Makes sure that none of these lies here.

        Raises:
            InternalError: one does.
        """
        shared = [
            range(segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(self._pool, include_traces=False)
            if segment["device"] == self._index
        ]
        for result in results:
            if isinstance(result, torch.Tensor):
                address = result.untyped_storage().data_ptr()
                if any(address in segment for segment in shared):
                    raise InternalError("a result of a recording lies in memory that other recordings use")


def piece_of(size: int) -> torch.Tensor:
    """Memory of the current GPU."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


_memories: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()
_making = threading.Lock()


def shared_memory(index: int) -> SharedMemory | None:
    """That of the recordings of a GPU; ``None`` where an allocator other than torch's own has no pools."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    with _making:
        memory = _memories.get(index)
        if memory is None:
            memory = _memories[index] = SharedMemory(index)
        return memory
