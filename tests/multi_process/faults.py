"""A backend that fails where a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend


class Faults:
    """A backend whose compilations do what ``happens`` says."""

    def __init__(self) -> None:
        self.happens: Callable[[], None] = lambda: None
        backend = resolve_backend("aot_eager")
        assert isinstance(backend, RegionBackend)
        self._compile_region = backend.compile_region
        self.backend = replace(backend, compile_region=self._compile)

    def _compile(self, *arguments: Any) -> Any:
        self.happens()
        return self._compile_region(*arguments)
