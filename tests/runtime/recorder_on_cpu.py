"""A recorder for the CPU, with which the rules of replay are tested.

A replay runs the program again on what lies at the recorded addresses and writes over the results of the run before.
What a program wrongly still holds is then visibly wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsplit.compile_core.runtime.graphed_program import Program


def at_the_address_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that reads the same memory without holding it."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


class RecorderOnCpu:
    """Attributes: ``recorded`` and ``replayed`` count, ``segmented`` what is recorded in parts; ``against`` is the
    reason to give; ``failure`` is raised."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.segmented = 0
        self.against = ""
        self.failure: Exception | None = None

    lends = False

    def lent(self, tensors: list[torch.Tensor], replay: Any) -> list[torch.Tensor]:
        return tensors

    def in_parts(self, within: Any = None) -> RecorderOnCpu:
        self.segmented += 1
        return self

    def reason_against(self) -> str:
        return self.against

    def rehearse(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        return program(inputs)

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        if self.failure is not None:
            raise self.failure
        self.recorded += 1
        # CUDA computes nothing while it records.
        before = [tensor.clone() for tensor in inputs]
        for tensor in inputs:
            if not tensor.is_floating_point():
                tensor.data.zero_()  # What is copied at each replay is uninitialised, and no index.
        with torch.random.fork_rng([]):
            results = program([*inputs])
        for tensor, value in zip(inputs, before, strict=True):
            if not torch.equal(tensor, value):
                tensor.data.copy_(value)
        borrowed = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        places = [at_the_address_of(tensor) for tensor in inputs]

        def replay() -> None:
            self.replayed += 1
            for place, value in zip(results, program([*places]), strict=True):
                if place is not None and place.untyped_storage().data_ptr() not in borrowed:
                    place.copy_(value)

        return replay, results

    def follow(self, stream: Any) -> Any:
        return stream


class _Replay:
    """Attributes:
    lent: what memory it gave away, and ``results`` what was recorded there, if anything was.
    """

    def __init__(self, replay: Callable[[], None]) -> None:
        self._replay = replay
        self.lent: Sequence[torch.Tensor] = ()
        self.results: Sequence[Any] = ()
        self.within: _Replay | None = None

    def __call__(self) -> None:
        _spoil(self.results)
        self._replay()
        if self.within is not None:
            _spoil(self.within.lent)


def _spoil(tensors: Sequence[Any]) -> None:
    """Makes them what nobody takes for a result."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)


class LendingRecorder(RecorderOnCpu):
    """Spoils what one recording overwrites of another: a backward what its forward kept, the forward its results.

    Attributes:
        within: how many recordings were made in the memory of others.
    """

    lends = True

    def __init__(self) -> None:
        super().__init__()
        self.within = 0

    def lent(self, tensors: list[torch.Tensor], replay: Any) -> list[torch.Tensor]:
        assert not replay.lent, "memory is lent once"
        replay.lent = tensors
        return tensors

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        replay, results, own = self._recorded(program, inputs)
        made = _Replay(replay)
        if within is not None:
            self.within += 1
            made.within = within
            within.results = own
        return made, results

    def in_parts(self, within: Any = None) -> RecorderOnCpu:
        parts = super().in_parts()
        return parts if within is None else _PartsWithin(self, within)

    def _recorded(
        self, program: Program, inputs: list[torch.Tensor]
    ) -> tuple[Callable[[], None], Sequence[Any], list[torch.Tensor]]:
        """A recording, and of its results those that do not lie in the memory of an input."""
        borrowed = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        replay, results = RecorderOnCpu.record(self, program, inputs)
        own = [
            result
            for result in results
            if result is not None and result.untyped_storage().data_ptr() not in borrowed
        ]
        return replay, results, own


class _PartsWithin(RecorderOnCpu):
    """Parts whose results the earlier recording overwrites. What that lent is read by any of them."""

    def __init__(self, whole: LendingRecorder, within: _Replay) -> None:
        super().__init__()
        self._whole, self._within = whole, within
        whole.within += 1

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: Any = None
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        replay, results, own = self._whole._recorded(program, inputs)
        self._within.results = [*self._within.results, *own]
        return replay, results
