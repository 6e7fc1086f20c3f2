"""``one_hot`` of a known number of classes is compiled with what is around it, and raises where torch does."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import one_hot

import gradsplit


def _quantized(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    nearest = one_hot(x.argmin(1), num_classes=x.shape[1]).to(x.dtype)
    counts.add_(nearest.sum(0))
    return (x * nearest).sum(1)


def test_no_call_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gradsplit")
    compiled = gradsplit.compile(_quantized, fullgraph=True)
    for seed, rows in enumerate((3, 4, 5)):
        found = []
        for function in (_quantized, compiled):
            torch.manual_seed(seed)
            x, counts = torch.randn(rows, 3, requires_grad=True), torch.zeros(3)
            result = function(x, counts)
            result.sum().backward()
            found.append((result, counts, x.grad))
        torch.testing.assert_close(*found)
    assert not caplog.records


def test_classes_out_of_range_raise() -> None:
    compiled = gradsplit.compile(lambda classes: one_hot(classes, 3) * 2, fullgraph=True)
    assert compiled(torch.tensor([0, 2])).tolist() == [[2, 0, 0], [0, 0, 2]]
    for classes in ([0, 3], [-1, 0]):
        with pytest.raises(RuntimeError, match="Class values must be"):
            compiled(torch.tensor(classes))
