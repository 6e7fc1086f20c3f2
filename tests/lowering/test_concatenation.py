"""Concatenations that begin alike share a buffer, and mean what they meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core.ir.loops import LoopNest, Store
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.autograd.compare_with_eager import check
from tests.lowering.lowering_harness import compute_of, trace


def dense_block(x, a, b, c, d):
    """Each layer reads all that came before it."""
    features = [x]
    for weight in (a, b, c, d):
        y = torch.cat(features, 1).sin()
        features.append(torch.einsum("nchw,ck->nkhw", y, weight))
    return torch.cat(features, 1).cos()


def weights(count=4, growth=3, first=5):
    return [torch.randn(first + growth * n, growth) / 3 for n in range(count)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_dense_block(layout):
    x = torch.randn(2, 5, 4, 6).to(memory_format=layout).requires_grad_()
    inputs = [x, *(w.requires_grad_() for w in weights())]
    check(dense_block, *inputs, backend="triton", rtol=1e-5, atol=1e-5)


def stored_elements(program_of, *inputs) -> int:
    """How many elements of concatenations a forward program stores."""
    program = fuse(lower(compute_of(trace(program_of, *inputs))))
    total = 0
    for nest in program.steps:
        if isinstance(nest, LoopNest):
            for store in nest.body:
                if isinstance(store, Store) and store.access.buffer.startswith("cat"):
                    total += torch.Size(nest.extents).numel()
    return total


def test_each_part_is_stored_once():
    x = torch.randn(2, 5, 4, 6)
    assert stored_elements(dense_block, x, *weights()) == 2 * 4 * 6 * (5 + 4 * 3)


def test_what_others_read_has_no_gaps():
    """A result, and the operand of a matrix product, are concatenations of their own."""

    def program(a, b, c, w):
        short = torch.cat([a, b], 1)
        return short, F.relu(torch.cat([a, b, c], 1)), torch.cat([a, b], 1) @ w

    a, b, c = (torch.randn(3, n) for n in (2, 3, 4))
    check(program, a, b, c, torch.randn(5, 2), backend="triton", rtol=1e-5, atol=1e-5)


def test_other_dims_and_dtypes_share_nothing():
    def program(a, b, c):
        short = torch.cat([a, b], 1).exp()
        other = torch.cat([a, b, c], 0).exp()
        wide = torch.cat([a, b, c.double()], 1).exp()
        return short, other, wide

    a, b, c = (torch.randn(3, 3) for _ in "abc")
    check(program, a, b, c, backend="triton", rtol=1e-6, atol=1e-6)


def test_a_longer_one_may_come_first():
    def program(a, b, c):
        return torch.cat([a, b, c], 1).exp().sum(), torch.cat([a, b], 1).exp().sum(), torch.cat([a], 1).exp()

    a, b, c = (torch.randn(3, n, requires_grad=True) for n in (2, 3, 4))
    check(program, a, b, c, backend="triton", rtol=1e-5, atol=1e-5)


def test_equal_parts_are_stored_together():
    """By one kernel, although each does the same to buffers of its own, which others leave to a batch."""

    def program(a, b, c):
        return torch.cat([a, b, c], 1)

    lowered = lower(compute_of(trace(program, *(torch.randn(3, 8) for _ in "abc"))))
    gpu = torch.device("cuda", 0)
    buffers = {name: replace(spec, device=gpu) for name, spec in lowered.buffers.items()}
    assert len(fuse(replace(lowered, buffers=buffers)).steps) == 1
