"""A few random programs on each run; ``python -m tests.differential`` runs as many as one likes."""

import pytest
import torch

import gradsplit
from tests.differential.compare import check
from tests.differential.reduce_program import reduce_program
from tests.differential.write_program import write_program

_FIRST, _GROUPS, _IN_GROUP = 130, 4, 10


@pytest.mark.parametrize("group", range(_GROUPS))
def test_a_random_program_is_the_same_compiled(group: int) -> None:
    for seed in range(_FIRST + group * _IN_GROUP, _FIRST + (group + 1) * _IN_GROUP):
        source = write_program(seed)
        verdict = check(source)
        if verdict.is_finding:
            kind = verdict.kind
            smaller = reduce_program(source, lambda text: check(text).kind == kind, 20.0)  # noqa: B023
            pytest.fail(f"seed {seed}: {verdict.kind}: {verdict.detail}\n{smaller}")


def test_zeros_without_memory_as_a_gradient() -> None:
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    result = gradsplit.compile(lambda x: torch.tensordot(x, x, 1).sgn())(x)
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.zeros_like(x))
