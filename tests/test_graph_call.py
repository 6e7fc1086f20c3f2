"""What a compiled function says a call would run, before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile_core.compiled_function import CompiledFunction


def compiling(fn: Callable[..., Any]) -> tuple[CompiledFunction, list[torch.fx.GraphModule]]:
    """Compiled with torch's own kernels, and the graphs that ran."""
    ran: list[torch.fx.GraphModule] = []

    def compile_graph(captured: Any, inputs: Any) -> Any:
        def run(*tensors: torch.Tensor) -> Any:
            ran.append(captured.module)
            return captured.module(*tensors)

        return run

    return CompiledFunction(fn, compile_graph), ran


def scaled(x: torch.Tensor, factor: float = 2.0, *, shift: float = 0.0) -> torch.Tensor:
    return x.sin() * factor + shift


def test_a_call_of_one_graph() -> None:
    compiled, ran = compiling(scaled)
    x = torch.randn(3)
    assert compiled.find_graph_call(x) is None, "nothing is compiled yet"
    compiled(x, shift=1.0)
    call = compiled.find_graph_call(x, shift=1.0)
    assert call is not None and len(ran) == 1
    (given,) = call.inputs
    assert given is x
    torch.testing.assert_close(call(), scaled(x, shift=1.0))
    assert len(ran) == 2
    assert compiled.find_graph_call(x, 3.0) is None, "no entry is for this factor"
    with pytest.raises(TypeError):
        compiled.find_graph_call()


def test_the_entry_is_in_front_then() -> None:
    compiled, _ = compiling(scaled)
    x = torch.randn(3)
    compiled(x)
    older = compiled.entries[0]
    compiled(x.double())
    assert compiled.entries[0] is not older
    assert compiled.find_graph_call(x) is not None
    assert compiled.entries[0] is older


def test_a_function_without_arguments() -> None:
    x = torch.randn(3)
    compiled, ran = compiling(lambda: x.cos())
    compiled()
    call = compiled.find_graph_call()
    assert call is not None
    torch.testing.assert_close(call(), x.cos())
    assert len(ran) == 2


def test_calls_that_run_more_than_a_graph() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return y.cos()

    def no_graph(x: torch.Tensor) -> int:
        return x.dim()

    x = torch.randn(3)
    for function in (breaks, no_graph):
        compiled, _ = compiling(function)
        compiled(x)
        compiled(x)
        assert compiled.find_graph_call(x) is None


def test_modules() -> None:
    module = nn.Linear(3, 2)
    compiled, _ = compiling(module)
    x = torch.randn(4, 3)
    compiled(x)
    call = compiled.find_graph_call(x)
    assert call is not None
    torch.testing.assert_close(call(), module(x))
    handle = module.register_forward_pre_hook(lambda module, args: None)
    assert compiled.find_graph_call(x) is None, "the hook runs before the graph"
    handle.remove()
    assert compiled.find_graph_call(x) is not None
