"""A compiled graph for a GPU that runs after what it needs of the CPU: see ``captured_graphs.host_part``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from gradsplit.compile_core.ir.host_part import HostPart
from gradsplit.compile_core.torch_facts.random_state import draws_returned_on_error


class AfterHostPart:
    """Called with the whole graph's inputs.

    Args:
        run: the compiled ``parts.device``.
    """

    def __init__(self, parts: HostPart, run: Callable[..., Any]) -> None:
        self.run = run
        self._host = parts.host.forward  # hooks on all modules of the program are not for it
        self._parts = parts

    @property
    def programs(self) -> Any:
        return self.run.programs  # type: ignore[attr-defined]

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        parts = self._parts
        with draws_returned_on_error() if parts.may_draw else nullcontext():
            computed = self._host(*(inputs[position] for position in parts.host_inputs))
            given = [inputs[position] for position in parts.device_inputs]
            results = self.run(*given, *computed[: parts.handed])
        return tuple((computed if of_host else results)[position] for of_host, position in parts.results)
