"""Results of torch's kernels, which lie as their arguments do, where an argument lies otherwise than it was traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compile_core


def empty_slice(x: torch.Tensor) -> torch.Tensor:
    x[0:2].fill_(7)
    x[3:3:3].fill_(9)  # left to torch's slice_scatter
    return x + 1


def every_other(x: torch.Tensor) -> torch.Tensor:
    x[0:2].mul_(2)
    x[::2].fill_(9)
    return (x * 3).flip(0)


@pytest.mark.parametrize("program", [empty_slice, every_other])
@pytest.mark.parametrize(
    ("size", "stride"), [((3, 4), (8, 1)), ((3, 4), (8, 2)), ((3, 1, 1), (2, 2, 1)), ((3, 4), (1, 3))]
)
def test_changed_inputs_with_gaps(program: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    memory = [torch.arange(64.0) for _ in range(2)]
    plain, twin = (one.as_strided(size, stride) for one in memory)
    expected = program(plain)
    found = compile_core.compile(program, fullgraph=True)(twin)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert torch.equal(*memory)
