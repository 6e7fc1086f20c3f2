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

    def in_parts(self) -> RecorderOnCpu:
        self.segmented += 1
        return self

    def reason_against(self) -> str:
        return self.against

    def record(
        self, program: Program, inputs: list[torch.Tensor]
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
