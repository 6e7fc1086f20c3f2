"""Graphs bound to sizes as wholes, as CUDA graphs need them."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.verify_graphs import verify_schedule
from gradsplit.compile_core.many_sizes.graph_of_many_sizes import GraphOfManySizes, bind_sizes
from gradsplit.compile_core.pipeline import CompiledGraph


def open_graph(run: Any, *inputs: Any) -> PartitionedGraph:
    made = gradsplit.compile(run, dynamic=True)
    made(*inputs)
    compiled = made.entries[0].compiled
    assert isinstance(compiled, CompiledGraph)
    return compiled.partitioned


def test_what_is_bound_has_no_numbers() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    graph = open_graph(lambda x: (x[1:].mean(0).sin(), x.view(-1)), x)
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
        made = GraphOfManySizes(graph, compile_programs, frozenset(), fallback, must_compile)
        with caplog.at_level(logging.WARNING, "gradsplit"):
            for rows in (2, 3, 4, 5, 2, 2):
                assert torch.equal(made(torch.ones(rows))[0], torch.full((rows,), float(rows)))
        assert len(compiled) == count and len(made.programs) == 2
    assert sum("different sizes (the limit)" in record.message for record in caplog.records) == 1
