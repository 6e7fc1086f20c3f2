"""Random differentiable programs with views and changes in place; see ``random_programs`` for longer runs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.autograd.random_programs import check, generate

BATCH = 30


@pytest.mark.parametrize("first", range(0, 300, BATCH))
def test_compiled_equals_eager(first):
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        program = generate(seed)
        try:
            outcomes[check(program)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}:\n{program}\n{error}") from None
    # Most programs are compiled, not left to eager.
    assert outcomes["compiled"] > BATCH * 0.6, outcomes


@pytest.mark.parametrize("first", range(300, 330, 10))
def test_generated_kernels_equal_eager(first):
    for seed in range(first, first + 10):
        check(generate(seed), backend="triton")
