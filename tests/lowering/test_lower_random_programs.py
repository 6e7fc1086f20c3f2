"""Property: a random program means the same before and after lowering and fusion."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lowering.lowering_harness import check_module, trace

DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)


def _bounded(x: Tensor) -> Tensor:
    """Keeps values small, so that rounding differences stay small."""
    return x.clamp(-4, 4) if x.dtype != torch.bool else x


def _unary(draw: st.DrawFn, x: Tensor) -> Tensor:
    kind = draw(st.sampled_from(["tanh", "neg", "abs", "add", "mul", "compare", "exp", "cast", "square"]))
    if kind == "cast":
        return x.to(draw(st.sampled_from(DTYPES)))
    if kind == "compare":
        return x > 0
    if kind == "add":
        return x + draw(st.sampled_from([1, 0.5, -2]))
    if kind == "mul":
        return _bounded(x * draw(st.sampled_from([2, -0.5])))
    if x.dtype == torch.bool:
        return ~x
    if kind in ("tanh", "exp"):
        return torch.tanh(x) if kind == "tanh" else torch.exp(torch.sin(x))
    return _bounded({"neg": torch.neg, "abs": torch.abs, "square": torch.square}[kind](x))


def _shapes_broadcast(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def _binary(draw: st.DrawFn, x: Tensor, y: Tensor) -> Tensor:
    if not _shapes_broadcast(x, y) or x.numel() * y.numel() > 20000:
        return x
    kind = draw(st.sampled_from(["add", "mul", "maximum", "where", "less"]))
    if kind == "less":
        return x < y
    if kind == "where":
        return torch.where(x > 0, x, y)
    if kind == "maximum":
        return torch.maximum(x, y.to(x.dtype))
    return _bounded(x + y if kind == "add" else x * y)


def _factors(draw: st.DrawFn, count: int) -> list[int]:
    shape: list[int] = []
    while count > 1 and len(shape) < 4:
        divisor = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        shape.append(divisor)
        count //= divisor
    return [*shape, count]


def _view(draw: st.DrawFn, x: Tensor) -> Tensor:
    kind = draw(
        st.sampled_from(["permute", "reshape", "slice", "expand", "flip", "select", "squeeze", "reshape"])
    )
    if kind == "reshape" and x.numel():
        return x.reshape(_factors(draw, x.numel()))
    if kind == "expand":
        return x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape)
    if not x.dim():
        return x.unsqueeze(0)
    dim = draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    if kind == "slice":
        start = draw(st.integers(0, size))
        return x[
            (slice(None),) * dim + (slice(start, draw(st.integers(start, size)), draw(st.integers(1, 2))),)
        ]
    if kind == "select" and size:
        return x.select(dim, draw(st.integers(0, size - 1)))
    if kind == "flip":
        return x.flip(dim)
    if kind == "squeeze":
        return x.squeeze(dim)
    return x.permute(draw(st.permutations(range(x.dim()))))


def _reduce(draw: st.DrawFn, x: Tensor) -> Tensor:
    if not x.dim() or not x.numel():
        return x.sum()
    dims = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, unique=True))
    keepdim = draw(st.booleans())
    kind = draw(st.sampled_from(["sum", "mean", "amax", "any", "argmax", "softmax"]))
    if kind in ("sum", "any"):
        return getattr(torch, kind)(x, dims, keepdim=keepdim)
    if x.dtype == torch.bool:
        return x.all(dims, keepdim=keepdim)
    if kind == "argmax":
        return x.argmax(dims[0], keepdim=keepdim)
    if kind == "softmax":
        return torch.softmax(x.float(), dims[0])
    if kind == "mean":
        return x.float().mean(dims, keepdim=keepdim)
    return x.amax(dims, keepdim=keepdim)


def _combine(draw: st.DrawFn, x: Tensor, y: Tensor) -> Tensor:
    kind = draw(st.sampled_from(["cat", "gather", "pad", "matmul"]))
    if not x.dim() or not x.numel():
        return x
    if kind == "cat":
        return torch.cat([x, x.flip(0)], draw(st.integers(0, x.dim() - 1)))
    if kind == "gather":
        return x[y.reshape(-1)[:3].to(torch.int64).remainder(x.shape[0])]
    if kind == "pad":
        return torch.constant_pad_nd(x.float(), (1, 2), 0.5)
    flat = torch.tanh(x.reshape(x.shape[0], prod(x.shape[1:])).float())
    return flat @ flat.t()


INPUT_SHAPES = st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6, 0, 8]), max_size=4), min_size=1, max_size=3)


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(shapes=INPUT_SHAPES, seed=st.integers(0, 99), data=st.data())
def test_random_programs(shapes: list[list[int]], seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    draw: Any = data.draw

    def run(*tensors: Tensor) -> list[Tensor]:
        values = list(tensors)
        for _ in range(draw(st.integers(2, 12))):
            x = values[draw(st.integers(0, len(values) - 1))]
            y = values[draw(st.integers(0, len(values) - 1))]
            kind = draw(st.sampled_from(["unary", "binary", "view", "view", "reduce", "combine"]))
            if kind in ("binary", "combine"):
                value = (_binary if kind == "binary" else _combine)(draw, x, y)
            else:
                step = {"unary": _unary, "view": _view, "reduce": _reduce}[kind]
                value = step(draw, x)
            if value.numel() <= 4000:
                values.append(value)
        return values[len(tensors) :][-3:] + values[-1:]

    check_module(trace(run, *inputs), inputs, 2e-4)
