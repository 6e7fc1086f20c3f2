"""A module built twice and called plain and compiled: results, gradients, all that it holds and the random state must
be equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradsplit
from tests.capture.same_as_plain import assert_same


def check_module(
    build: Callable[[], nn.Module],
    run: Callable[..., Any] = lambda module, *arguments: module(*arguments),
    make_arguments: Callable[[], tuple[Any, ...]] = lambda: (torch.randn(3, 4),),
    *,
    fullgraph: bool = True,
    calls: int = 3,
    captures: int | None = 1,
) -> Any:
    """Compare ``run(module, *arguments)`` over several calls of one module; ``captures`` is how many there may be."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    ours = build()
    compiled = gradsplit.compile(run, backend="eager", fullgraph=fullgraph)
    for call in range(calls):
        outcomes = []
        for module, function in ((plain, run), (ours, compiled)):
            torch.manual_seed(call)
            result = function(module, *make_arguments())
            tensors = [
                leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            if tensors:
                torch.stack([tensor.double().abs().sum() for tensor in tensors]).sum().backward()
            outcomes.append((result, _holdings(module), torch.get_rng_state()))
        for part, one, other in zip(("result", "module", "random state"), *outcomes, strict=True):
            assert_same(one, other, f"{part} of call {call}")
    if captures is not None:
        assert len(compiled.entries) == captures
    return compiled


def _leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _holdings(module: nn.Module) -> dict[str, Any]:
    return {
        "parameters": {name: (value, value.grad) for name, value in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
        "modules": [(name, type(child).__name__, child.training) for name, child in module.named_modules()],
        "attributes": {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (int, float, torch.Tensor))
        },
    }
