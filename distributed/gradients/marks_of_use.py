"""Whether any rank has a gradient for a parameter that this rank has none for: then it gets the mean, else it stays.

Ranks may run other branches of a module. After its gradients each bucket holds a mark for each of its parameters, which
is averaged with them: infinity where a rank has a gradient, and zero where it has none. A sum or mean of these is zero
only if all are, in every dtype, and infinity stays in place. So where all gradients come, as a rule,
no mark is written or read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from gradsplit.distributed.gradients.bucket_buffers import BucketBuffers


class MarksOfUse:
    """Of one plan's buckets.

    Args:
        buffers: of that plan.
    """

    def __init__(self, buffers: BucketBuffers) -> None:
        self._buffers = buffers
        # What this rank has marked so lately: others may have done the same, so that the mean is no mark of use.
        self._without: set[str] = set()

    def are_there(self, names: Iterable[str]) -> bool:
        """Whether the marks say that this rank has gradients for all of these."""
        return self._without.isdisjoint(names)

    def write(self, bucket: int, without: Collection[str]) -> None:
        """Before a bucket is averaged: ``without`` are those that this rank has no gradient for."""
        marks = self._buffers.marks(bucket)
        for place, name in enumerate(self._buffers.names[bucket]):
            if name in without or name in self._without:
                marks[place] = 0.0 if name in without else math.inf
        self._without.difference_update(self._buffers.names[bucket])
        self._without.update(without)

    def used_by_none(self, without: Iterable[str]) -> frozenset[str]:
        """When all buckets are averaged: which of those that this rank has no gradient for no other has either. On
        a GPU the host waits for it."""
        buckets = {self._buffers.bucket_of[name] for name in without}
        return frozenset(
            name
            for bucket in buckets
            for name, mark in zip(
                self._buffers.names[bucket], self._buffers.marks(bucket).tolist(), strict=True
            )
            if mark == 0
        )
