"""What the driver is asked for, in order; on a GPU, what it does then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradsplit.compile_core.ir.kernels import BuiltKernel, CudaLaunch
from gradsplit.compile_core.toolchain.torch_library import build_library, cpp_enum
from gradsplit.distributed.collectives import driver_queue
from gradsplit.distributed.collectives.driver_queue import DriverQueue
from gradsplit.distributed.collectives.mean_kernel import MeanKernel

STREAM = 77
P, U64, U32, INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int


class Driver:
    """Notes what it is asked for; fails at the operation of this number."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.failing = -1
        self._functions = {
            "gs_copy": ctypes.CFUNCTYPE(INT, U64, U64, ctypes.c_size_t, P)(self._note("copy")),
            "gs_write": ctypes.CFUNCTYPE(INT, P, U64, U32, U32)(self._note("write")),
            "gs_wait": ctypes.CFUNCTYPE(INT, P, U64, U32, U32)(self._note("wait")),
            "gs_launch": ctypes.CFUNCTYPE(INT, P, *([U32] * 7), P, P, P)(self._launch),
        }
        for name, function in self._functions.items():
            P.in_dll(library, name).value = ctypes.cast(function, P).value
        library.gs_queue.argtypes = (P, ctypes.c_int64, P)

    def _note(self, name: str) -> Callable[..., int]:
        def note(*arguments: Any) -> int:
            self.asked.append((name, *arguments))
            return 719 if len(self.asked) - 1 == self.failing else 0

        return note

    def _launch(self, function: int, *arguments: Any) -> int:
        *sizes, stream, parameters, _ = arguments
        places = [U64.from_address(parameters + 8 * k).value for k in range(4)]
        values = [U64.from_address(place).value for place in places]
        return self._note("launch")(function, *sizes, stream, *values)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    library = build_library(driver_queue._SOURCE, cpp_enum(driver_queue.Operation))
    held = {name: P.in_dll(library, name).value for name in driver_queue._FUNCTIONS}
    monkeypatch.setattr(driver_queue, "load_queue", lambda: library)
    yield Driver(library)
    for name, address in held.items():
        P.in_dll(library, name).value = address


def kernel_of(grid: tuple[int, int, int]) -> BuiltKernel:
    return BuiltKernel(lambda *buffers: None, 4242, CudaLaunch(torch.device("cuda", 0), grid, 128, 1024))


def test_operations_are_queued_in_order_and_once(driver: Driver) -> None:
    queue = DriverQueue()
    first, second = torch.zeros(16), torch.ones(16)
    queue.copy(first, second)
    queue.write(1000, 2**32 - 1)
    queue.wait(2000, 5)
    queue.launch(kernel_of((9, 8, 1)), first, second)
    assert not driver.asked
    queue.queue(STREAM)
    queue.queue(STREAM)
    addresses = first.data_ptr(), second.data_ptr()
    assert driver.asked == [
        ("copy", *addresses, 64, STREAM),
        ("write", STREAM, 1000, 2**32 - 1, 0),
        ("wait", STREAM, 2000, 5, 0),
        ("launch", 4242, 9, 8, 1, 128, 1, 1, 1024, STREAM, *addresses, 0, 0),
    ]


def test_nothing_is_queued_behind_what_fails(driver: Driver) -> None:
    queue = DriverQueue()
    driver.failing = 1
    for address in (100, 200, 300):
        queue.write(address, 1)
    with pytest.raises(RuntimeError, match=r"cannot average gradients by copies \(CUDA error 719\)"):
        queue.queue(STREAM)
    assert [asked[2] for asked in driver.asked] == [100, 200]
    queue.queue(STREAM)
    assert len(driver.asked) == 2


@pytest.mark.parametrize("grid, begin", [((1, 1, 2), 0), ((1, 1, 1), 1)])
def test_kernels_that_need_more_are_refused(grid: tuple[int, int, int], begin: int, driver: Driver) -> None:
    with pytest.raises(ValueError, match="cannot launch"):
        DriverQueue().launch(kernel_of(grid), torch.zeros(8)[begin:])


@pytest.mark.gpu
def test_operations_run_one_behind_the_other() -> None:
    device = torch.device("cuda", 0)
    queue = DriverQueue()
    mean = MeanKernel(device, queue.launch)
    mean.build(torch.float32)
    part, other, held = (torch.full((10_000,), value, device=device) for value in (1.0, 5.0, 0.0))
    word = torch.zeros(1, dtype=torch.int32, device=device)
    queue.copy(held, part)
    mean(part, other, 2)
    queue.copy(other, part)
    queue.write(word.data_ptr(), 3)
    queue.wait(word.data_ptr(), 2)
    queue.queue(torch.cuda.current_stream().cuda_stream)
    assert [tensor.unique().tolist() for tensor in (part, other, held, word)] == [[3.0], [3.0], [1.0], [3]]
