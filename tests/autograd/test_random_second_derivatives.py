"""Second derivatives of random programs: with ``double_backward`` they are eager's, without it eager's or an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import grad

from gradsplit.compile_core.errors import Unsupported
from tests.autograd import random_programs
from tests.autograd.compare_with_eager import compile_program
from tests.autograd.random_programs import Program, generate

BATCH = 30


def second_derivatives(run: Callable[..., Any], program: Program) -> list[torch.Tensor]:
    """By the inputs and by the gradients that arrive; zeros where there is none."""
    torch.manual_seed(3)
    leaves = random_programs._leaves(program.inputs)
    inputs = random_programs._inputs(leaves, program.inputs)
    results = run(*inputs)
    roots = [result for result in results if result.requires_grad]
    roots += [tensor for tensor in inputs if tensor.requires_grad and not tensor.is_leaf]
    if not roots:
        return []
    generator = torch.Generator().manual_seed(1)
    arriving = [
        torch.randn(root.shape, generator=generator, dtype=root.dtype).requires_grad_() for root in roots
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    first = grad(roots, wanted, arriving, create_graph=True, allow_unused=True)
    differentiable = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    by = [*wanted, *arriving]
    if not differentiable:
        return [torch.zeros_like(tensor) for tensor in by]
    weights = [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in differentiable]
    return list(grad(differentiable, by, weights, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("first", range(0, 2 * BATCH, BATCH))
def test_second_derivatives_equal_eager(first):
    outcomes: Counter[tuple[bool, str]] = Counter()
    for seed in range(first, first + BATCH):
        program = generate(seed)
        module = program.graph()
        try:
            expected = second_derivatives(module, program)
        except RuntimeError:
            continue
        examples = random_programs._inputs(random_programs._leaves(program.inputs), program.inputs)
        for option in (True, False):
            try:
                compiled = compile_program(module, examples, options={"double_backward": option})
                found = second_derivatives(compiled, program)
            except Unsupported as reason:
                outcomes[option, reason.reason_id] += 1
                continue
            outcomes[option, "same"] += 1
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-9, atol=1e-9, equal_nan=True, msg=f"seed {seed}:\n{program}"
                )
    assert outcomes[True, "same"] > BATCH * 0.4 and outcomes[False, "double-backward"] > 0, outcomes
