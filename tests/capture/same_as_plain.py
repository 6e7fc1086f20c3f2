"""A program run plain and compiled: results, gradients, changed arguments and random state must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import gradsplit


class Graphs:
    """A backend that runs graphs as they are. Attributes: ``count``, of the graphs that it got."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.count += 1
        return gm.forward


def check_same(
    program: Callable[..., Any],
    make_arguments: Callable[[], tuple[Any, ...]],
    *,
    backend: Any = "eager",
    fullgraph: bool = True,
    calls: int = 2,
) -> Any:
    """Compare ``calls`` calls on new arguments each; returns the compiled function."""
    compiled = gradsplit.compile(
        program, backend=backend, fullgraph=fullgraph, options={"fallback_random": True}
    )
    for call in range(calls):
        torch.manual_seed(call)
        arguments = make_arguments()
        twins = pytree.tree_map(twin_of, arguments)
        expected = run_once(program, arguments, call)
        found = run_once(compiled, twins, call)
        for part, one, other in zip(
            ("results", "arguments", "gradients", "random state"), expected, found, strict=True
        ):
            assert_same(one, other, part)
    return compiled


def run_once(function: Callable[..., Any], arguments: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    results = function(*arguments)
    leaves = pytree.tree_leaves(arguments)
    losses = [
        tensor.abs().sum() for tensor in pytree.tree_leaves(results)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]  # fmt: skip
    if losses:
        sum(losses).backward()
    gradients = [leaf.grad if isinstance(leaf, torch.Tensor) and leaf.is_leaf else None for leaf in leaves]
    return results, arguments, gradients, torch.get_rng_state()


def twin_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
        return twin.requires_grad_(value.requires_grad)
    return value.copy() if isinstance(value, np.ndarray) else value


def assert_same(expected: Any, found: Any, part: str) -> None:
    """Types, metadata and values agree; values up to the rounding of another order of operations."""
    assert type(expected) is type(found), f"{part}: {type(expected)} and {type(found)}"
    if isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape, expected.requires_grad) == (
            found.dtype, found.shape, found.requires_grad), part  # fmt: skip
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text: f"{part}: {text}")
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape), part
        exact = expected.dtype.itemsize >= 8
        rtol, atol = (
            (1e-9, 1e-12) if exact else (1e-2, 1e-2) if expected.dtype == np.float16 else (1e-5, 1e-6)
        )
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=part)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), part
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other, part)
    elif isinstance(expected, dict):
        assert list(expected) == list(found), part
        for key, one in expected.items():
            assert_same(one, found[key], part)
    else:
        assert expected == found, f"{part}: {expected!r} and {found!r}"
