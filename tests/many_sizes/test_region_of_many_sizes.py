"""Regions with open sizes: what runs a size when it first comes, and from when its program does."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import gradsplit
from gradsplit.compile_core.backends import compile_elsewhere
from gradsplit.compile_core.ir.numbers import SizeReader, expression_of
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.many_sizes.region_of_many_sizes import RegionOfManySizes
from gradsplit.compile_core.observe.stage_times import Stopwatch
from gradsplit.compile_core.pipeline import CompiledGraph

HERE = {"compile_elsewhere": False}


def function(x: Tensor, n: int) -> Any:
    rows = x.shape[0]
    return (x[: rows // 2] * n + torch.arange(rows // 2)[:, None]).sin(), x.reshape(-1) / rows, rows + n


def regions(made: Any) -> list[RegionOfManySizes]:
    """Those of the graph that was called last, forward and backward."""
    compiled = made.entries[0].compiled
    assert isinstance(compiled, CompiledGraph)
    programs = [program for program in (compiled.forward, compiled.backward) if program is not None]
    every = [region for program in programs for region in program.regions.values()]
    found = [region for region in every if isinstance(region, RegionOfManySizes)]
    assert found == every
    return found


def wait_for(made: Any) -> None:
    end_s = time.monotonic() + 120
    while any(region.is_compiling for region in regions(made)):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def compare(made: Any, run: Callable[..., Any], x: Tensor, *others: Any, between: Any = None) -> None:
    """Results and gradients; ``between`` is called between forward and backward."""
    found, expected = made(x, *others), run(x, *others)
    tensors = [[value for value in results if isinstance(value, Tensor)] for results in (found, expected)]
    torch.testing.assert_close(*tensors)
    if between is not None:
        between()
    weights = [torch.rand_like(value) for value in tensors[0]]
    gradients = [
        torch.autograd.grad(sum((w * value).sum() for w, value in zip(weights, results, strict=True)), x)
        for results in tensors
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_entry_and_one_trace_with_gradients(backend: str, dynamic: bool | None) -> None:
    watch = Stopwatch()
    options = HERE if backend == "triton" else None
    made = gradsplit.compile(function, backend=backend, dynamic=dynamic, fullgraph=True, options=options)
    for rows, n in ((4, 3), (6, 5), (9, 3), (6, 5)):
        compare(made, function, torch.randn(rows, 3, requires_grad=True), n)
    entries = 1 if dynamic else 2
    assert len(made.entries) == entries
    seconds = watch.seconds()
    assert len(seconds["trace_joint"]) == len(seconds["partition"]) == entries
    if backend == "triton":
        # Forward and backward for each of the sizes.
        assert len(seconds["lower"]) == 2 * 3


def test_no_call_waits_for_another_size() -> None:
    made = gradsplit.compile(function, dynamic=True, fullgraph=True)
    compare(made, function, torch.randn(4, 3, requires_grad=True), 3)
    watch = Stopwatch()
    for rows in (6, 8, 9):
        compare(made, function, torch.randn(rows, 3, requires_grad=True), 3)
    wait_for(made)
    assert [len(region.programs) for region in regions(made)] == [1, 1]
    # A backward may be torch's where the forward was a program, and the other way round.
    for rows in (6, 8, 9):
        compare(made, function, torch.randn(rows, 3, requires_grad=True), 3)
    assert [len(region.programs) for region in regions(made)] == [4, 4]
    assert "lower" not in watch.seconds()


def test_a_backward_of_kernels_behind_a_forward_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Any:
        # What is saved lies otherwise than torch's kernels would lay it.
        return (torch.softmax(x.t() @ x, 0).exp().t(),)

    made = gradsplit.compile(run, dynamic=True)
    compare(made, run, torch.randn(4, 3, requires_grad=True))
    compare(made, run, torch.randn(5, 3, requires_grad=True))
    wait_for(made)
    # No program is taken up under somebody's capture.
    is_capturing = "gradsplit.compile_core.many_sizes.region_of_many_sizes._is_capturing"
    monkeypatch.setattr(is_capturing, lambda: True)
    x = torch.randn(5, 3, requires_grad=True)
    compare(made, run, x, between=lambda: monkeypatch.setattr(is_capturing, lambda: False))
    assert [len(region.programs) for region in regions(made)] == [1, 2]


def test_tensors_that_the_graph_holds() -> None:
    large, small = torch.randn(40), torch.tensor(2.0)

    def run(x: Tensor) -> Any:
        return (x * torch.tensor(3.0) + large * small, x[:, :2] @ torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    made = gradsplit.compile(run, dynamic=True)
    for rows in (4, 5, 5):
        compare(made, run, torch.randn(rows, 40, requires_grad=True))
        wait_for(made)
    assert [len(region.programs) for region in regions(made)] == [2, 2]


def test_strides_from_where_a_view_begins() -> None:
    """Which was wrong: what a tensor's description left out was where it begins in its storage."""

    def run(x: Tensor) -> Any:
        return torch.as_strided(x[1:], (2, x.shape[0]), (2, 1), 7) * 2, torch.as_strided(
            x[1:].t(), (3,), (1,), 6
        )

    made = gradsplit.compile(run, dynamic=True, options=HERE)
    for rows in (4, 5):
        compare(made, run, torch.randn(rows, 6, requires_grad=True))


def test_programs_do_not_take_integers() -> None:
    def changed(n: int, x: Tensor, y: Tensor) -> Any:
        y.mul_(n)
        return x * n, y[1:]

    compiled = gradsplit.compile(changed, dynamic=True, fullgraph=True, options=HERE)
    for n, rows in ((3, 4), (5, 4), (5, 7)):
        x, y = torch.randn(rows, requires_grad=True), torch.randn(rows)
        kept = y.clone()
        result, view = compiled(n, x, y)
        torch.testing.assert_close((y, view), (kept * n, y[1:]))
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, torch.full((rows,), float(n)))
        assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_a_backend_that_asks_for_a_size_gets_a_guard() -> None:
    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        columns = int(examples[0].shape[1])
        return lambda *inputs: (module(*inputs)[0] * 0 + columns,)

    made = gradsplit.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for rows, columns in ((3, 4), (5, 4), (5, 6), (7, 6)):
        assert torch.equal(made(torch.ones(rows, columns)), torch.full((rows, columns), float(columns)))
    assert len(made.entries) == 2


def test_floats_and_sizes_of_one_graph() -> None:
    def run(x: Tensor, rate: float) -> Any:
        filled = torch.full_like(x, rate) + torch.full((x.shape[0], 1), rate)
        return (x * rate + x.shape[0] / 2 * rate, filled * x, x / x.shape[0])

    made = gradsplit.compile(run, dynamic=True)
    for rows, rate in ((4, 0.5), (6, 0.25), (6, 1.5), (9, 2.5), (9, 3.5)):
        compare(made, run, torch.randn(rows, 3, requires_grad=True), rate)
        wait_for(made)
    assert [len(region.programs) for region in regions(made)] == [2, 2]


def test_too_many_sizes_run_with_torchs_own_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gradsplit.config, "sizes_limit", 2)
    made = gradsplit.compile(lambda x: (x * x.shape[0],), dynamic=True, options=HERE)
    with caplog.at_level(logging.WARNING, "gradsplit"):
        for rows in (2, 3, 4, 5, 2, 4):
            compare(made, lambda x: (x * x.shape[0],), torch.ones(rows, requires_grad=True))
    assert [len(region.programs) for region in regions(made)] == [2, 2]
    assert sum("different sizes (the limit)" in record.message for record in caplog.records) == 2


def test_deterministic_algorithms_wait_for_the_program() -> None:
    made = gradsplit.compile(function, dynamic=True)
    torch.use_deterministic_algorithms(True)
    try:
        compare(made, function, torch.randn(4, 3, requires_grad=True), 3)
        compare(made, function, torch.randn(7, 3, requires_grad=True), 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [len(region.programs) for region in regions(made)] == [2, 2]


def test_operators_of_the_process_are_compiled_in_it() -> None:
    with torch.library._scoped_library("many_sizes_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("many_sizes_test::twice", torch.empty_like, lib=library)

        def run(x: Tensor) -> Tensor:
            return torch.ops.many_sizes_test.twice(x) + 1

        made = gradsplit.compile(run, dynamic=True)
        for rows in (3, 4):
            assert torch.equal(made(torch.ones(rows)), torch.full((rows,), 3.0))
        assert [len(region.programs) for region in regions(made)] == [2]


def test_a_compilation_that_fails_leaves_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        compile_elsewhere._workers, "ask", lambda request: {"error": "no room", "traceback": ""}
    )
    made = gradsplit.compile(function, dynamic=True)
    compare(made, function, torch.randn(4, 3, requires_grad=True), 3)
    with caplog.at_level(logging.WARNING, "gradsplit"):
        for _ in range(3):
            compare(made, function, torch.randn(7, 3, requires_grad=True), 3)
            wait_for(made)
    assert sum(record.message.endswith("compiled in this process: no room") for record in caplog.records) == 2
    assert [len(region.programs) for region in regions(made)] == [1, 1]
    compare(made, function, torch.randn(8, 3, requires_grad=True), 3)
    assert [len(region.programs) for region in regions(made)] == [2, 2]


def open_compute(run: Callable[..., Any], x: Tensor) -> Compute:
    """The forward of a graph whose sizes are open."""
    made = gradsplit.compile(run, dynamic=True, options=HERE)
    made(x)
    return regions(made)[0].compute


def test_results_lie_as_those_of_the_program() -> None:
    """What reads them has been compiled for that, and may be a program already."""
    compute = open_compute(lambda x: x.sin(), torch.randn(4, 3))
    futures: list[Future[Any]] = []

    def elsewhere(*_: Any) -> Any:
        return lambda values: futures.append(Future()) or futures[-1]

    region = RegionOfManySizes(
        compute,
        lambda compute: lambda: lambda arguments: [arguments.pop().sin()],
        lambda arguments: [arguments.pop().t().sin().contiguous().t()],  # as torch's kernel might lay it
        elsewhere,
        lambda what: nullcontext(),
    )
    region.start()()
    x = torch.randn(7, 3)
    (found,) = region([x])
    assert found.stride() == (3, 1) and torch.equal(found, x.sin()) and len(futures) == 1
    assert region.is_compiling
    futures[0].set_result(lambda: lambda arguments: [arguments.pop().cos()])
    (found,) = region([x])
    assert torch.equal(found, x.cos()) and len(futures) == 1


def test_who_waits_for_this_process_is_told() -> None:
    told: list[str] = []

    @contextmanager
    def announce(what: str) -> Iterator[None]:
        told.append(f"begins: {what}")
        yield
        told.append("ends")

    region = RegionOfManySizes(
        open_compute(lambda x: x.sin(), torch.randn(4, 3)),
        lambda compute: lambda: lambda arguments: [arguments.pop().sin()],
        lambda arguments: [arguments.pop().sin()],
        lambda *_: None,
        announce,
    )
    region.start()()
    region([torch.randn(5, 3)])
    region([torch.randn(5, 3)])
    assert told == ["begins: compiles another size of a graph", "ends"]


PROGRAM = """
import time, torch, gradsplit
from gradsplit.compile_core.backends import compile_elsewhere
compile_elsewhere._workers.ask = lambda request: time.sleep(1000)
made = gradsplit.compile(lambda x: x.sin() + x.cos(), dynamic=True)
for rows in range(3, 6):
    assert torch.equal(made(torch.zeros(rows)), torch.ones(rows))
"""


def test_a_process_that_ends_waits_for_no_compilation() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_a_size_is_read_from() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    s, t, w = (mode.from_tensor(torch.empty(size), symbolic_context=dims).shape[0] for size in (6, 7, 9))
    with mode:
        single = torch.empty_strided((1, 5), (w, 1))
        strided = torch.empty_strided((s,), (w,))
        flat = torch.empty(3 * t + 2)
    reader = SizeReader([single, strided, flat])
    assert reader.at_compilation == (6, 9, 7)
    # The stride of a dim of one element says nothing, and a size may say another one.
    given = [torch.empty_strided((1, 5), (5, 1)), torch.empty_strided((4,), (8,)), torch.empty(17)]
    named = dict(zip(map(str, reader.symbols), reader.values(given), strict=True))
    assert named == {str(expression_of(symbol)): value for symbol, value in ((s, 4), (w, 8), (t, 5))}
