"""Products of bfloat16 that a caller gets as float32, as the gradients of weights under autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from tests.lowering.lowering_harness import calls, compute_of, nests, trace

aten = torch.ops.aten


def _factors(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(6, 8).to(dtype), torch.randn(8, 6).to(dtype)]


def _wide(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).float()


def test_yield_float32() -> None:
    program = lower(compute_of(trace(_wide, *_factors(), device_type="cuda")))
    (call,) = calls(program)
    assert call.target is aten.mm.dtype_out and call.arguments[-1] is torch.float32
    assert not nests(program)
    (view,) = program.outputs
    assert view is not None and program.buffers[view.buffer].dtype == torch.float32


def test_yield_it_where_the_caller_wants_it() -> None:
    module = trace(_wide, *_factors(), device_type="cuda")
    program = lower(compute_of(module, {"result_0": "bucket"}, {"result_0": (1, 6)}))
    (call,) = calls(program)
    assert call.target is aten.mm.dtype_out and call.out["out"].buffer == "result_0"
    assert not nests(program)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (_wide, torch.float16),  # whose products may overflow, which a scaler of losses looks for
        (lambda x, y: ((z := x @ y).float(), z), torch.bfloat16),
        (lambda x, y: (x @ y).float().exp(), torch.bfloat16),
        (lambda x, y: (x @ y).double(), torch.bfloat16),
    ],
)
def test_others_are_rounded(function: Callable[..., object], dtype: torch.dtype) -> None:
    program = lower(compute_of(trace(function, *_factors(dtype), device_type="cuda")))
    assert aten.mm.dtype_out not in {call.target for call in calls(program)}


def test_on_a_cpu_none_are_wide() -> None:
    program = lower(compute_of(trace(_wide, *_factors())))
    assert {call.target for call in calls(program)} == {aten.mm.out}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_of_weights_are_not_rounded(mode: str) -> None:
    """They are nearer to float64's than the nearest numbers of bfloat16."""
    x, w = (torch.randn(256, 64, device="cuda"), torch.randn(32, 64, device="cuda", requires_grad=True))
    slope = torch.randn(256, 32, device="cuda").bfloat16()
    step = gradsplit.compile(F.linear, mode=mode)
    for _ in range(4):
        w.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            result = step(x, w)
        result.backward(slope)
    assert w.grad is not None
    exact = slope.double().t() @ x.bfloat16().double()
    torch.testing.assert_close(w.grad.double(), exact, rtol=1e-4, atol=1e-3)
    assert (w.grad.double() - exact).abs().max() < (w.grad.bfloat16().double() - exact).abs().max() / 8
