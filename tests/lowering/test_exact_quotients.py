"""Quotients of bfloat16s by constants, as kernels for GPUs compute them."""

from __future__ import annotations

import pytest
import torch

from gradsplit.compile_core.lowering.build import generate
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.triton_kernels.exact_quotients import product_of_quotient
from tests.lowering.lowering_harness import compute_of, trace
from tests.lowering.product_programs import on

DIVISORS = [0.9, 0.95, 0.8, 0.7, 0.1, 3.0, 768.0, -0.6, 1e-5, 12345.678]


def float32(number: float) -> float:
    return torch.tensor(number).item()


@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_product_is_the_quotient_of_every_bfloat16(divisor: float) -> None:
    parts = product_of_quotient(float32(divisor))
    assert parts is not None and parts == tuple(map(float32, parts))
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    high, low = parts
    # Exact before it is rounded, as a fused multiplication and addition is.
    products = (numbers.double() * high + (numbers * low).double()).float()
    quotients = numbers / divisor
    exact = (numbers.abs() >= 2.0**-60) | (numbers == 0)
    assert torch.equal(products[exact].view(torch.int32), quotients[exact].view(torch.int32))
    assert torch.equal(products.isnan(), quotients.isnan())
    units = (products.view(torch.int32) - quotients.view(torch.int32)).abs()
    assert units[~numbers.isnan()].max() <= 1


@pytest.mark.parametrize("divisor", [0.0, 0.5, float("inf"), float("nan"), 1e30, 1e-30])
def test_some_divisors_have_no_such_product(divisor: float) -> None:
    assert product_of_quotient(divisor) is None


def test_kernels_divide_only_what_is_no_bfloat16() -> None:
    def text(function: object, *inputs: torch.Tensor) -> str:
        program = fuse(on(torch.device("cuda", 0), lower(compute_of(trace(function, *inputs)))))
        return "\n".join(generate(step, program.buffers).text for step in program.steps)

    short, long = torch.randn(300).to(torch.bfloat16), torch.randn(300)
    assert "tl.fma(" in (kernel := text(lambda x: x / 0.9, short)) and "div_rn" not in kernel
    assert (
        "tl.fma(" in (kernel := text(lambda x: x.to(torch.bfloat16) / 0.9, long)) and "div_rn" not in kernel
    )
    assert "div_rn" in text(lambda x: x / 0.9, long)
    assert "div_rn" in text(lambda x, y: x / y, short, short)
