"""Kernels into a driver that is not there; ``test_triton_batches.py`` has the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.lowering.triton_kernels import load_binary as module
from gradsplit.compile_core.lowering.triton_kernels.load_binary import load_binary


class Driver:
    """Notes what it is called for; each result is the next number, unless the call fails, or that of an attribute."""

    def __init__(
        self, has_context: bool, failing: str = "", attributes: Mapping[tuple[str, int], int] | None = None
    ) -> None:
        self.calls: list[str] = []
        self.settings: list[tuple[str, list[int]]] = []
        self._has_context, self._failing = has_context, failing
        self._attributes = attributes or {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuCtxGetCurrent" and not self._has_context:
                return 0
            if hasattr(arguments[0], "_obj"):  # what ``byref`` gives
                asked = getattr(arguments[1], "value", 0) if len(arguments) > 1 else 0
                arguments[0]._obj.value = self._attributes.get((name, asked), len(self.calls))
            elif name.startswith("cuFuncSet"):
                self.settings.append((name, [argument.value for argument in arguments[1:]]))
            return 98 if name == self._failing else 0

        return call


@pytest.mark.parametrize("has_context", [True, False])
def test_a_thread_has_a_context_before_it_loads(has_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(has_context)
    monkeypatch.setattr(module, "_driver", lambda: driver)
    handle, most_threads = load_binary("gs_kernel", b"\x7fELF\0\0", 1, 48 << 10)
    made = [] if has_context else ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    loaded = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"]
    assert driver.calls == ["cuCtxGetCurrent", *made, *loaded]
    assert (handle, most_threads) == (len(made) + 3, len(made) + 4)


@pytest.mark.parametrize("shared_bytes", [(48 << 10) + 1, 227_000, 227_001])
def test_more_shared_memory_is_asked_for(shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton's module of C; of a block that cannot have it there may be no thread."""
    limits = {("cuDeviceGetAttribute", 97): 227_512, ("cuFuncGetAttribute", 1): 512}
    driver = Driver(True, attributes={**limits, ("cuFuncGetAttribute", 0): 1024})
    monkeypatch.setattr(module, "_driver", lambda: driver)
    _, most_threads = load_binary("gs_kernel", b"\x7fELF\0\0", 0, shared_bytes)
    fits = shared_bytes <= 227_000
    assert most_threads == (1024 if fits else 0)
    assert driver.settings == (
        [("cuFuncSetCacheConfig", [1]), ("cuFuncSetAttribute", [8, 227_000])] if fits else []
    )


def test_a_kernel_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver", lambda: Driver(True, failing="cuModuleGetFunction"))
    with pytest.raises(CompileError, match="the driver's cuModuleGetFunction gives error 98"):
        load_binary("gs_kernel", b"\x7fELF\0\0", 0, 0)
