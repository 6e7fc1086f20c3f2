"""Regions that run in C: what is freed when, what is raised, how kernels are launched."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import BuiltKernel, CudaLaunch, KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, LoopProgram, Step, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.passes import buffers_of
from gradsplit.compile_core.runtime import link_program as link_program_module
from gradsplit.compile_core.runtime import region_interpreter as loader
from gradsplit.compile_core.runtime.encode_program import encode_program
from gradsplit.compile_core.runtime.instructions import instructions_of
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from gradsplit.compile_core.toolchain.cpp_compiler import builtin_function
from tests.runtime.test_link_program import CPU, doubling, extern, spec, whole

aten = torch.ops.aten

C_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
LARGE = 1 << 24  # elements of a buffer, so many that nothing else counts


def c_kernel(function: Callable[[ctypes.Array], int | None]) -> BuiltKernel:
    """A kernel of C that runs a Python function of the buffers' addresses."""
    callback = C_KERNEL(lambda addresses: function(addresses) or 0)

    def call(*buffers: torch.Tensor) -> None:
        function((ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers)))

    call.callback = callback  # type: ignore[attr-defined]
    return BuiltKernel(call, ctypes.cast(callback, ctypes.c_void_p).value or 0)


def program_of(
    steps: Sequence[Step], outputs: Sequence[View], buffers: dict[str, TensorSpec]
) -> tuple[LoopProgram, list[KernelSource]]:
    """A program of one input ``x`` and nests that read one buffer and write one."""
    program = LoopProgram("test", ("x",), (), buffers, {}, tuple(steps), tuple(outputs))
    nests = [nest for nest in steps if isinstance(nest, LoopNest)]
    return program, [KernelSource(nest.name, "cpp", "", buffers_of(nest), CPU) for nest in nests]


class MallocState(ctypes.Structure):
    """What ``mallinfo2`` of the C library returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallocState


def allocated_bytes() -> int:
    """What is allocated now. The process's size tells less: a buffer may lie in what an earlier test gave back."""
    state = mallinfo2()
    return state.uordblks + state.hblkhd


pytestmark = pytest.mark.usefixtures("region_form")


def test_buffers_are_freed_behind_their_last_use():
    count = 12
    names = [f"t{k}" for k in range(count)]
    steps = [doubling(f"nest{k}", one, other, LARGE) for k, (one, other) in enumerate(pairwise(names))]
    first = doubling("first", "x", "t0", LARGE)
    program, sources = program_of(
        [first, *steps], [whole(names[-1], LARGE)], dict.fromkeys(("x", *names), spec(LARGE))
    )
    seen: list[int] = []
    kernel = c_kernel(lambda addresses: seen.append(allocated_bytes()))
    run = link_program(program, sources, {source.name: kernel for source in sources})
    run([torch.empty(LARGE)])
    assert len(seen) == count and max(seen) - min(seen) <= 1.5 * LARGE * 4


def test_an_input_is_freed_behind_its_last_use():
    alive: list[bool] = []
    program, sources = program_of(
        [doubling("one", "x", "y", 3), doubling("two", "y", "z", 3)],
        [whole("z", 3)],
        {"x": spec(3), "y": spec(3), "z": spec(3)},
    )
    x = torch.ones(3)
    reference = weakref.ref(x)
    kernel = c_kernel(lambda addresses: alive.append(reference() is not None))
    arguments = [x]
    del x
    link_program(program, sources, dict.fromkeys(("one", "two"), kernel))(arguments)
    assert alive == [True, False] and arguments == []


def test_an_operator_that_raises_leaks_nothing():
    steps = [
        doubling("nest", "x", "y", LARGE),
        extern(aten.empty_like.default, (whole("y", LARGE),), "r"),
        extern(aten.mm.default, (View("y", (LARGE // 2,), (1,)), [whole("r", LARGE)]), "z"),
    ]
    program, sources = program_of(steps, [whole("z", LARGE)], dict.fromkeys("xyrz", spec(LARGE)))
    run = link_program(program, sources, {"nest": c_kernel(lambda addresses: None)})
    before = allocated_bytes()
    for _ in range(6):
        with pytest.raises(RuntimeError):
            run([torch.empty(LARGE)])
    gc.collect()
    assert allocated_bytes() - before < 2 * LARGE * 4


def test_a_kernel_that_finds_an_index_out_of_range():
    program, sources = program_of(
        [doubling("nest", "x", "y", 3)], [whole("y", 3)], {"x": spec(3), "y": spec(3)}
    )

    def fails(*buffers: torch.Tensor) -> None:
        raise IndexError("index out of range in a compiled gather (embedding, index_select)")

    callback = C_KERNEL(lambda addresses: 1)
    kernel = BuiltKernel(fails, ctypes.cast(callback, ctypes.c_void_p).value or 0)
    with pytest.raises(IndexError, match="out of range"):
        link_program(program, sources, {"nest": kernel})([torch.ones(3)])


def test_memory_that_there_is_not():
    size = 1 << 50
    program, sources = program_of(
        [doubling("nest", "x", "y", 3)], [whole("y", size)], {"x": spec(3), "y": spec(size)}
    )
    with pytest.raises(RuntimeError, match="memory"):
        link_program(program, sources, {"nest": c_kernel(lambda addresses: None)})([torch.ones(3)])


def test_an_operator_that_returns_something_else():
    steps = [extern(aten.relu.default, (whole("x", 3),), "y", "z"), doubling("nest", "z", "r", 3)]
    program, sources = program_of(steps, [whole("r", 3)], dict.fromkeys("xyzr", spec(3)))
    with pytest.raises((TypeError, ValueError)):
        link_program(program, sources, {"nest": c_kernel(lambda addresses: None)})([torch.ones(3)])


def test_another_number_of_inputs():
    program, sources = program_of([], [whole("x", 3)], {"x": spec(3)})
    with pytest.raises((TypeError, ValueError)):
        link_program(program, sources, {})([torch.ones(3), torch.ones(3)])


def test_tensors_inside_of_lists():
    stack = extern(aten.cat.default, ([whole("x", 3), View("x", (2,), (1,), 1)],), "y")
    program, sources = program_of([stack], [whole("y", 5)], {"x": spec(3), "y": spec(5)})
    (result,) = link_program(program, sources, {})([torch.arange(3.0)])
    assert result.tolist() == [0.0, 1.0, 2.0, 1.0, 2.0]


def test_a_change_of_one_result_is_noticed_in_another_in_the_same_buffer():
    step = ExternCall(aten.add.out, (whole("x", 4), 1), {}, (), {"out": whole("y", 4)})
    halves = [View("y", (2,), (1,), 2 * k) for k in range(2)]
    program, sources = program_of([step], halves, {"x": spec(4), "y": spec(4)})
    first, second = link_program(program, sources, {})([torch.zeros(4)])
    version = second._version
    first.add_(1)
    assert first.tolist() == [2.0, 2.0] and second.tolist() == [1.0, 1.0] and second._version != version


def test_results_under_inference_mode():
    program, sources = program_of(
        [doubling("nest", "x", "y", 4)], [View("y", (2, 2), (2, 1))], dict.fromkeys("xy", spec(4))
    )
    run = link_program(program, sources, {"nest": c_kernel(lambda addresses: None)})
    with torch.inference_mode():
        (result,) = run([torch.zeros(4)])
    assert result.is_inference() and result.shape == (2, 2)


def test_kernels_run_beside_other_threads_of_python():
    """Each waits for the other: that takes two kernels at once, and so a lock of Python's that is given back."""
    program, sources = program_of(
        [doubling("nest", "x", "y", 3)], [whole("y", 3)], dict.fromkeys("xy", spec(3))
    )
    meeting = threading.Barrier(2, timeout=20)
    run = link_program(program, sources, {"nest": c_kernel(lambda addresses: meeting.wait() * 0)})
    threads = [threading.Thread(target=run, args=([torch.ones(3)],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not meeting.broken


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fails(*arguments: object) -> None:
        raise CompileError("there is none")

    monkeypatch.setattr(loader, "load_library", fails)
    monkeypatch.setattr(link_program_module, "region_interpreter", region_interpreter.__wrapped__)
    program, sources = program_of(
        [doubling("nest", "x", "y", 3)], [whole("y", 3)], dict.fromkeys("xy", spec(3))
    )
    with caplog.at_level(logging.INFO, "gradsplit"):
        run = link_program(program, sources, {"nest": lambda x, y: y.copy_(2 * x)})
    assert "regions are run by generated Python: there is none" in caplog.text
    assert run([torch.ones(3)])[0].tolist() == [2.0, 2.0, 2.0]


class FakeDriver:
    """Takes the place of the driver's functions, and notes launches."""

    LAUNCH = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        *(ctypes.c_uint,) * 7,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    )
    CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))

    def __init__(self, library: ctypes.CDLL) -> None:
        self.launches: list[tuple] = []
        self.status = 0
        self.context: int | None = 1
        self._functions = (self.LAUNCH(self._launch), self.CONTEXT(self._current_context))
        for name, function in zip(("gs_launch_kernel", "gs_current_context"), self._functions, strict=True):
            ctypes.c_void_p.in_dll(library, name).value = ctypes.cast(function, ctypes.c_void_p).value

    def _launch(self, kernel, x, y, z, threads, ty, tz, shared, stream, parameters, extra) -> int:
        addresses = [ctypes.c_uint64.from_address(parameters[k]).value for k in range(4)]
        self.launches.append((kernel, (x, y, z), (threads, ty, tz), shared, stream, addresses))
        return self.status

    def _current_context(self, place) -> int:
        place[0] = self.context
        return 0


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    interpreter = region_interpreter()
    assert interpreter is not None
    library = interpreter._library
    kept = [
        ctypes.c_void_p.in_dll(library, name).value for name in ("gs_launch_kernel", "gs_current_context")
    ]
    yield FakeDriver(library)
    for name, value in zip(("gs_launch_kernel", "gs_current_context"), kept, strict=True):
        ctypes.c_void_p.in_dll(library, name).value = value


@pytest.mark.parametrize("case", ["launched", "unaligned", "fails", "no context", "no handle"])
def test_launches(driver: FakeDriver, case: str):
    """By the driver, or by the Python function where that is not possible."""
    called: list[tuple] = []
    launch = CudaLaunch(torch.device("cuda", 0), (7, 2, 1), 128, 512)
    kernel = BuiltKernel(lambda *buffers: called.append(buffers), 0 if case == "no handle" else 4711, launch)
    program, (source,) = program_of(
        [doubling("nest", "x", "y", 8)], [whole("y", 8)], dict.fromkeys("xy", spec(8))
    )
    source = KernelSource("nest", "triton", "", ("x", "y"), CPU, bases=(1 if case == "unaligned" else 4, 0))
    encoded = encode_program(
        instructions_of(program, kernels_take_addresses=True), {"nest": source}, {"nest": kernel}, 3
    )
    assert encoded.device == (None if case == "no handle" else launch.device)
    driver.status = 700 if case == "fails" else 0
    driver.context = None if case == "no context" else 1
    interpreter = region_interpreter()
    assert interpreter is not None
    run = builtin_function(interpreter._library, "gs_run", (encoded.words, encoded.constants, "<test>"))
    x = torch.zeros(8)
    begin = x.data_ptr() + (4 if case == "unaligned" else 16)
    (y,) = run([x], 99)
    if case in ("launched", "fails"):
        assert driver.launches == [(4711, (7, 2, 1), (128, 1, 1), 512, 99, [begin, y.data_ptr(), 0, 0])]
    else:
        assert driver.launches == []
    assert called == ([] if case == "launched" else [(begin, y.data_ptr())])
