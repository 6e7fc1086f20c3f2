"""Kernels into a driver that is not there; ``test_triton_batches.py`` has the real one."""

from __future__ import annotations

from typing import Any

import pytest

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.lowering.triton_kernels import load_binary as module
from gradsplit.compile_core.lowering.triton_kernels.load_binary import load_binary


class Driver:
    """Notes what it is called for; each result is the next number, unless the call fails."""

    def __init__(self, has_context: bool, failing: str = "") -> None:
        self.calls: list[str] = []
        self._has_context, self._failing = has_context, failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuCtxGetCurrent" and not self._has_context:
                return 0
            if hasattr(arguments[0], "_obj"):  # what ``byref`` gives
                arguments[0]._obj.value = len(self.calls)
            return 98 if name == self._failing else 0

        return call


@pytest.mark.parametrize("has_context", [True, False])
def test_a_thread_has_a_context_before_it_loads(has_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(has_context)
    monkeypatch.setattr(module, "_driver", lambda: driver)
    handle, most_threads = load_binary("gs_kernel", b"\x7fELF\0\0", 1)
    made = [] if has_context else ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    loaded = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"]
    assert driver.calls == ["cuCtxGetCurrent", *made, *loaded]
    assert (handle, most_threads) == (len(made) + 3, len(made) + 4)


def test_a_kernel_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver", lambda: Driver(True, failing="cuModuleGetFunction"))
    with pytest.raises(CompileError, match="the driver's cuModuleGetFunction gives error 98"):
        load_binary("gs_kernel", b"\x7fELF\0\0", 0)
