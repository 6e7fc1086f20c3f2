"""Which gradients of a round have been stored in 16 bits, until their bucket is averaged.

They lie in the memory where the means of 32 bits come to lie, at its beginning: one behind the other, in half as much.
So in one round a bucket has either 16 bits of its narrow gradients or 32. Where something has to be added to one of
them, or where one is missing or came in 32 bits, all of the bucket's are cast, and it stays wide until the round ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from distributed.gradients.bucket_buffers import BucketBuffers


class NarrowValues:
    """Of one plan's buckets.

    Args:
        buffers: of that plan.
    """

    def __init__(self, buffers: BucketBuffers) -> None:
        self._buffers = buffers
        self._bucket_of = {name: index for index, names in enumerate(buffers.narrow_names) for name in names}
        # Of the round: buckets with 32 bits, and the gradients whose 16 bits programs store now, or have stored.
        self._wide: set[int] = set()
        self._given: set[str] = set()
        self._here: set[str] = set()
        # By what programs store, with which dtypes: those that are narrow, if all are as they are sent.
        self._as_sent: dict[
            tuple[tuple[str, ...], tuple[torch.dtype | None, ...]], frozenset[str] | None
        ] = {}

    def places(
        self, names: tuple[str, ...], dtypes: tuple[torch.dtype | None, ...]
    ) -> list[torch.Tensor] | None:
        """``place`` of each, where that is the one in which it is sent, as in every step but exceptional ones; else
        ``None``."""
        key = names, dtypes
        if key not in self._as_sent:
            self._as_sent[key] = self._find_as_sent(names, dtypes)
        narrow = self._as_sent[key]
        if narrow is None or (narrow and self._wide):
            return None
        self._given |= narrow
        of_16_bits, of_32_bits = self._buffers.narrow_places, self._buffers.places
        return [of_16_bits[name] if name in narrow else of_32_bits[name] for name in names]

    def _find_as_sent(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype | None]
    ) -> frozenset[str] | None:
        sent = self._buffers.narrow_places
        given = dict(zip(names, dtypes, strict=True))
        if any(dtype != (sent[name].dtype if name in sent else None) for name, dtype in given.items()):
            return None
        return frozenset(sent.keys() & given.keys())

    def place(self, name: str, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Where a program may store a gradient of this dtype, or, for ``None``, of its parameter's; ``None`` where
        there is no place for it."""
        if dtype is None:
            return self._buffers.places[name] if self.leave(name) else None
        bucket = self._bucket_of.get(name)
        if bucket is None or bucket in self._wide or self._buffers.narrow_places[name].dtype != dtype:
            return None
        self._given.add(name)
        return self._buffers.narrow_places[name]

    def leave(self, name: str) -> bool:
        """Whether the place of this gradient's 32 bits is free of others' 16. If so, it stays that in this round."""
        bucket = self._bucket_of.get(name)
        if bucket is None or bucket in self._wide:
            return True
        names = self._buffers.narrow_names[bucket]
        if names.isdisjoint(self._given) and names.isdisjoint(self._here):
            self._wide.add(bucket)
            return True
        return False

    def arrived(self, names: Iterable[str]) -> None:
        """What was given out has been stored, for those among these names."""
        self._here |= self._given.intersection(names)
        self._given.clear()

    def widen(self, name: str) -> None:
        """Casts what has come to this gradient's bucket; nothing is being stored there."""
        bucket = self._bucket_of.get(name)
        if bucket is None or self.leave(name):
            return
        self._buffers.cast_narrow_values(bucket)
        self._here -= self._buffers.narrow_names[bucket]
        self._wide.add(bucket)

    def take(self, bucket: int) -> torch.Tensor | None:
        """The 16-bit values of all of a bucket's narrow part; ``None`` where it has 32 bits."""
        names = self._buffers.narrow_names[bucket]
        if names and bucket not in self._wide and self._here.issuperset(names):
            return self._buffers.narrow_values[bucket]
        for name in names:
            self.widen(name)
        return None

    def clear(self) -> None:
        """The round has ended, or broken off."""
        self._wide.clear()
        self._given.clear()
        self._here.clear()
