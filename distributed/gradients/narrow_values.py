"""The 16-bit values of a round's gradients, from when programs store them until their bucket is averaged.

A bucket whose gradients have all come in 16 bits is averaged from here. Where something has to be added to one of them,
or where one is missing or came in 32 bits, what is here is cast to the bucket's buffer first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from distributed.gradients.bucket_buffers import BucketBuffers

# torch exports it without declaring it.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@dataclass(frozen=True)
class _Memory:
    """Of one bucket in one round.

    Attributes:
        values: all.
        places: by parameter.
        stream: by which it was allocated; ``None`` on a CPU.
    """

    values: torch.Tensor
    places: Mapping[str, torch.Tensor]
    stream: int | None


class NarrowValues:
    """Of one plan's buckets.

    Args:
        buffers: of that plan.
    """

    def __init__(self, buffers: BucketBuffers) -> None:
        self._buffers = buffers
        self._bucket_of = {name: index for index, names in enumerate(buffers.narrow_names) for name in names}
        numel_of = {parameter.name: parameter.numel for parameter in buffers.plan.parameters}
        # Padding is to be zero.
        self._has_gaps = [
            part is not None and part.numel != sum(map(numel_of.__getitem__, names))
            for part, names in zip(buffers.narrow_parts, buffers.narrow_names, strict=True)
        ]
        # Of the round.
        self._memory: dict[int, _Memory] = {}
        # What was given out, and what has come there.
        self._given: set[str] = set()
        self._here: set[str] = set()

    def place(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Where a program may store a gradient of this dtype; ``None`` where there is no place for it."""
        bucket = self._bucket_of.get(name)
        if bucket is None:
            return None
        memory = self._memory.get(bucket) or self._allocate(bucket)
        if memory.values.dtype != dtype or memory.stream != _current_stream(memory.values):
            return None  # of another stream, it may be memory that kernels there still use
        self._given.add(name)
        return memory.places[name]

    def _allocate(self, bucket: int) -> _Memory:
        part, flat = self._buffers.narrow_parts[bucket], self._buffers.flat[bucket]
        assert part is not None
        make = torch.zeros if self._has_gaps[bucket] else torch.empty
        values = make(part.numel, dtype=part.dtype, device=flat.device)
        # All at once: each takes the host a microsecond or two.
        places = {name: self._buffers.place_in(values, name) for name in self._buffers.narrow_names[bucket]}
        memory = self._memory[bucket] = _Memory(values, places, _current_stream(values))
        return memory

    def arrived(self, names: Iterable[str]) -> None:
        """What was given out has been stored, for those among these names."""
        stored = self._given.intersection(names)
        self._given.clear()
        self._here |= stored
        if torch.is_anomaly_enabled():
            self.widen(stored)  # who looks for anomalies looks there

    def widen(self, names: Iterable[str]) -> None:
        """Casts what is here of these to their places in the buckets."""
        for name in self._here.intersection(names):
            memory = self._read(self._bucket_of[name])
            self._buffers.places[name].copy_(memory.places[name])
            self._here.discard(name)

    def take(self, bucket: int) -> torch.Tensor | None:
        """The values of all of a bucket's narrow part; ``None`` if they are in the bucket's buffer."""
        if bucket not in self._memory:
            return None
        if self._here.issuperset(self._buffers.narrow_names[bucket]):
            return self._read(bucket).values
        self.widen(self._buffers.narrow_names[bucket])
        return None

    def clear(self) -> None:
        """The round has ended, or broken off."""
        self._memory.clear()
        self._given.clear()
        self._here.clear()

    def _read(self, bucket: int) -> _Memory:
        memory = self._memory[bucket]
        if memory.stream != _current_stream(memory.values):
            memory.values.record_stream(torch.cuda.current_stream(memory.values.device))
        return memory


def _current_stream(memory: torch.Tensor) -> int | None:
    """That of the memory's GPU, as the driver knows it; ``None`` on a CPU."""
    return None if _stream_of is None or not memory.is_cuda else _stream_of(memory.device.index)
