"""Kernels against what their nest means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.lowering.codegen_nests import Case


def compare_buffers(
    case: Case,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float = 1e-5,
    text: str = "",
) -> None:
    """Asserts that flat storages after a kernel are those after the evaluator; shows the kernel's text if not."""
    for name, spec in case[1].items():
        bound = 1e-2 if spec.dtype in (torch.float16, torch.bfloat16) else tolerance
        torch.testing.assert_close(
            found[name].cpu(),
            expected[name],
            rtol=bound,
            atol=bound,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}\n{text}",
        )
