"""What is still to come to the gradients of one backward, and which buckets are complete.

It holds no tensors, so that its rules can be tested without any: buckets are started in the plan's order, each once,
when all that belongs to it has come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed.gradients.static_graph import changed


class Contributions:
    """Of one round.

    Args:
        buckets: the names in each bucket.
        announced: by name, how many contributions are known to come. A gradient of which none is known may still come,
            from a part of autograd's graph that does not exist yet, as under reentrant checkpoints; its bucket waits.
        unused: those to which nothing will come.

    Attributes:
        stored: the gradients to which something has come.
        has_begun: it is known of some gradient that something has come, or that nothing will.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[str]],
        announced: Mapping[str, int],
        unused: Collection[str] = frozenset(),
    ) -> None:
        self.stored: set[str] = set()
        self._bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
        self._left = [sum(name not in unused for name in names) for names in buckets]
        # Of the unused none is waited for, so none is the last.
        self._announced = {**dict.fromkeys(self._bucket_of, 1), **announced, **dict.fromkeys(unused, 0)}
        self._missing = dict(self._announced)
        self._started = 0
        self.has_begun = False

    @property
    def has_to_start(self) -> bool:
        """Whether a bucket is not started yet."""
        return self._started < len(self._left)

    def is_started(self, name: str) -> bool:
        """Whether the gradient's bucket is being reduced, so that nothing may be stored in it any more."""
        return self._bucket_of[name] < self._started

    def refuse_late(self, name: str, is_static: bool) -> None:
        """
        Raises:
            RuntimeError, CompileError: something has come to a gradient that is being reduced.
        """
        if not self.is_started(name):
            return
        if is_static:
            raise RuntimeError(changed(f"{name} got more than in the first backward"))
        raise CompileError(
            f"a gradient came to {name!r} after its bucket was reduced: the parameter is used in two checkpoints "
            f"with use_reentrant=True; pass use_reentrant=False, or static_graph=True to DistributedDataParallel"
        )

    def arrived(self, names: Iterable[str]) -> None:
        """One contribution to each of these has come."""
        names = tuple(names)
        self.stored.update(names)
        self.nothing_comes(names)

    def nothing_comes(self, names: Iterable[str]) -> None:
        """One contribution to each of these was announced, and turned out to be undefined."""
        missing, left, bucket_of = self._missing, self._left, self._bucket_of
        for name in names:
            self.has_begun = True
            missing[name] = still = missing[name] - 1
            if still == 0:
                left[bucket_of[name]] -= 1

    def left(self, name: str) -> int:
        """How many are still to come to this gradient."""
        return self._missing[name]

    def counts(self) -> dict[str, int]:
        """How many have come to each gradient, where any has; those included of which it is known that nothing will."""
        announced = self._announced.items()
        return {name: n - self._missing[name] if name in self.stored else 0 for name, n in announced}

    def take_complete(self) -> Iterator[int]:
        """The buckets to start now."""
        while self._started < len(self._left) and self._left[self._started] == 0:
            self._started += 1
            yield self._started - 1

    def take_rest(self) -> Iterator[int]:
        """The buckets that were not started, when nothing comes any more."""
        while self._started < len(self._left):
            self._started += 1
            yield self._started - 1
