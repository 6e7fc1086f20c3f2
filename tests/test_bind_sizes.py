"""What code generation compiles below a graph whose sizes are open: a program for each combination that comes."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.bind_sizes import GraphOfManySizes, bind_sizes
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.verify_graphs import verify_schedule
from gradsplit.compile_core.observe.stage_times import Stopwatch


def function(x: torch.Tensor, n: int) -> Any:
    rows = x.shape[0]
    return (x[: rows // 2] * n + torch.arange(rows // 2)[:, None]).sin(), x.reshape(-1) / rows, rows + n


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_entry_and_one_trace_with_gradients(backend: str, dynamic: bool | None) -> None:
    watch = Stopwatch()
    made = gradsplit.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows, n in ((4, 3), (6, 5), (9, 3), (6, 5)):
        x = torch.randn(rows, 3, requires_grad=True)
        found, expected = made(x, n), function(x, n)
        assert found[2] == expected[2]
        for one, other in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(one, other)
        gradients = [
            torch.autograd.grad(one.sum() + other.sum(), x)[0] for one, other, _ in (found, expected)
        ]
        torch.testing.assert_close(*gradients)
    entries = 1 if dynamic else 2
    assert len(made.entries) == entries
    seconds = watch.seconds()
    assert len(seconds["trace_joint"]) == len(seconds["partition"]) == entries
    if backend == "triton":
        # Forward and backward for each of the sizes.
        assert len(seconds["lower"]) == 2 * 3


def open_graph(run: Any, *inputs: Any) -> GraphOfManySizes:
    made = gradsplit.compile(run, dynamic=True)
    made(*inputs)
    compiled = made.entries[0].compiled
    assert isinstance(compiled, GraphOfManySizes)
    return compiled


def test_what_is_bound_has_no_numbers() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    graph = open_graph(lambda x: (x[1:].mean(0).sin(), x.view(-1)), x).partitioned
    for rows in (4, 7):
        bound = bind_sizes(graph, [torch.randn(rows, 3)])
        assert bound.backward is not None and not bound.signature.open_sizes
        for name, module in (("forward", bound.forward), ("backward", bound.backward)):
            schedule = whole_schedule(name, module)
            verify_schedule(schedule)
            values = [node.meta["val"] for node in module.graph.nodes if node.op != "output"]
            assert all(isinstance(value, torch.Tensor) for value in values)
            sizes = {size for value in values for size in (*value.shape, *value.stride())}
            assert all(type(size) is int for size in sizes) and rows - 1 in sizes
        _, alias = bound.signature.results
        assert not isinstance(alias, int) and alias.view is not None and alias.view[0] == (3 * rows,)


def test_too_many_sizes_run_with_torchs_own_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gradsplit.config, "cache_size_limit", 2)
    graph = open_graph(lambda x: x * x.shape[0], torch.ones(6))
    compiled: list[PartitionedGraph] = []

    def compile_programs(partitioned: PartitionedGraph, inputs: Sequence[Any]) -> Any:
        compiled.append(partitioned)
        return lambda x: (x * x.shape[0],)

    def fallback(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x * x.shape[0],)

    for must_compile, count in ((False, 2), (True, 5)):
        compiled.clear()
        made = GraphOfManySizes(graph.partitioned, compile_programs, fallback, must_compile)
        with caplog.at_level(logging.WARNING, "gradsplit"):
            for rows in (2, 3, 4, 5, 2, 2):
                assert torch.equal(made(torch.ones(rows))[0], torch.full((rows,), float(rows)))
        assert len(compiled) == count and len(made.programs) == 2
    assert sum("different sizes (the limit)" in record.message for record in caplog.records) == 1


def test_a_backend_that_asks_for_a_size_gets_a_guard() -> None:
    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        columns = int(examples[0].shape[1])
        return lambda *inputs: (module(*inputs)[0] * 0 + columns,)

    made = gradsplit.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for rows, columns in ((3, 4), (5, 4), (5, 6), (7, 6)):
        assert torch.equal(made(torch.ones(rows, columns)), torch.full((rows, columns), float(columns)))
    assert len(made.entries) == 2


def test_programs_do_not_take_integers() -> None:
    def changed(n: int, x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(n)
        return x * n, y[1:]

    compiled = gradsplit.compile(changed, dynamic=True, fullgraph=True)
    for n, rows in ((3, 4), (5, 4), (5, 7)):
        x, y = torch.randn(rows, requires_grad=True), torch.randn(rows)
        kept = y.clone()
        result, view = compiled(n, x, y)
        torch.testing.assert_close((y, view), (kept * n, y[1:]))
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, torch.full((rows,), float(n)))
        assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    for program in compiled.entries[0].compiled.programs:
        assert len(program.forward.schedule.inputs) == 2
