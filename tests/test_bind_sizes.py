"""Backends that know static sizes only, below an entry whose sizes are open."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import compile_core
from compile_core.bind_sizes import compile_per_sizes
from compile_core.compiled_function import CompiledFunction
from compile_core.ir.captured import CapturedGraph


def function(x: torch.Tensor, n: int) -> Any:
    rows = x.shape[0]
    return (x[: rows // 2] * n + torch.arange(rows // 2)[:, None]).sin(), x.reshape(-1) / rows, rows + n


@pytest.mark.parametrize("backend", ["aot_eager", "triton"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_entry_with_gradients(backend: str, dynamic: bool | None) -> None:
    made = compile_core.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
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
    assert len(made.entries) == (1 if dynamic else 2)


def test_what_is_compiled_has_no_open_sizes_and_is_compiled_once() -> None:
    seen: list[CapturedGraph] = []

    def compile_static(captured: CapturedGraph, inputs: list[torch.Tensor]) -> Any:
        assert not captured.has_open_sizes
        assert all(isinstance(tensor, torch.Tensor) for tensor in inputs)
        assert [tuple(entry.example.shape) for entry in captured.inputs] == [tuple(t.shape) for t in inputs]
        seen.append(captured)
        return captured.module

    made = CompiledFunction(function, compile_per_sizes(compile_static), fullgraph=True, dynamic=True)
    for rows, n in ((4, 3), (6, 5), (4, 3), (6, 5), (6, 7)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(made(x, n), function(x, n))
    assert len(seen) == 3 and len(made.entries) == 1


def test_too_many_sizes_run_with_torchs_own_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_core.config, "cache_size_limit", 2)
    compiled: list[Sequence[torch.Tensor]] = []

    def compile_static(captured: CapturedGraph, inputs: list[torch.Tensor]) -> Any:
        compiled.append(inputs)
        return captured.module

    for must_compile, count in ((False, 2), (True, 5)):
        compiled.clear()
        hook = compile_per_sizes(compile_static, must_compile=must_compile)
        made = CompiledFunction(lambda x: x * x.shape[0], hook, dynamic=True)
        with caplog.at_level(logging.WARNING, "compile_core"):
            for rows in (2, 3, 4, 5, 2):
                assert torch.equal(made(torch.ones(rows)), torch.full((rows,), float(rows)))
        assert len(compiled) == count
    assert sum("different sizes (the limit)" in record.message for record in caplog.records) == 1


def test_a_backend_that_asks_for_a_size_gets_a_guard() -> None:
    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        columns = int(examples[0].shape[1])
        return lambda *inputs: (module(*inputs)[0] * 0 + columns,)

    made = compile_core.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for rows, columns in ((3, 4), (5, 4), (5, 6), (7, 6)):
        assert torch.equal(made(torch.ones(rows, columns)), torch.full((rows, columns), float(columns)))
    assert len(made.entries) == 2
