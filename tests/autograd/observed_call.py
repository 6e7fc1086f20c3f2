"""One call and its backward, with all that a program can see of them: plain and compiled must agree in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.autograd.scenarios import Compile, check_scenario

Program = Callable[..., Any]
MakeInputs = Callable[[], tuple[Any, ...]]


def check_call(
    program: Program,
    make_inputs: MakeInputs,
    backend: str,
    caplog: pytest.LogCaptureFixture,
    *,
    left_to_torch: str | None = None,
    calls: int = 2,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """A program behaves compiled as it does plain, and all of it is compiled.

    Args:
        left_to_torch: the reason for which it is not compiled after all.
        calls: how often it is called, each time with new inputs.
        mode: what the calls are made under; the backward is not.
    """

    def scenario(compile: Compile) -> Any:
        function = compile(program)

        def call(*inputs: Any) -> Any:
            with mode():
                return function(*inputs)

        return [observed_call(call, make_inputs(), seed) for seed in range(calls)]

    with caplog.at_level(logging.WARNING, "gradsplit"):
        check_scenario(scenario, backend, breaks=left_to_torch is not None)
    assert left_to_torch is None or f"[{left_to_torch}]" in caplog.text, caplog.text


def observed_call(function: Program, inputs: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """Results, how they lie in memory, what autograd knows of them, what became of the inputs, gradients."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    torch.manual_seed(seed)
    returned = function(*inputs)
    results = [value for value in pytree.tree_leaves(returned) if isinstance(value, torch.Tensor)]
    observed = {
        "results": [result.detach().clone() for result in results],
        "others": [value for value in pytree.tree_leaves(returned) if not isinstance(value, torch.Tensor)],
        "metadata": [_metadata(result) for result in results],
        "sharing": _sharing([*results, *tensors]),
        "changes": [tensor._version - before for tensor, before in zip(tensors, versions, strict=True)],
        "random state": torch.get_rng_state(),
    }
    roots = [result for result in results if result.grad_fn is not None]
    generator = torch.Generator().manual_seed(1)
    arriving = [
        torch.randn(root.shape, generator=generator, dtype=torch.float64).to(root.dtype) for root in roots
    ]
    if roots:
        torch.autograd.backward(roots, arriving)
    observed["inputs"] = [tensor.detach().clone() for tensor in tensors]
    observed["gradients"] = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
    return observed


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor.is_conj(), strides


def _sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (j, k) for k in range(len(places)) for j in range(k) if places[j] == places[k] and tensors[k].numel()
    ]
