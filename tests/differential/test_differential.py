"""A few random programs on each run; ``python -m tests.differential`` runs as many as one likes."""

from pathlib import Path

import pytest
import torch

import gradsplit
from tests.differential.compare import check
from tests.differential.reduce_program import reduce_program
from tests.differential.search import Search
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


def test_what_crashes_or_is_luck_in_plain_pytorch_is_no_finding(tmp_path: Path) -> None:
    search = Search(tmp_path, tmp_path, 60.0, 0, False)
    # The writing crashes; memory behind a tensor's own was read.
    search.run([{"seed": 19025}, {"seed": 6040}], 1)
    assert not search.findings and sum(search.kinds.values()) == 2


def test_zeros_without_memory_as_a_gradient() -> None:
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    result = gradsplit.compile(lambda x: torch.tensordot(x, x, 1).sgn())(x)
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.zeros_like(x))


_TWO_CALLS = """
import torch
OPTIONS, CALLS, BACKWARD, CHOSEN = {}, 2, "grad", "all"

def state():
    leaf = torch.ones(1, 4, requires_grad=True)
    return [leaf.clone()], [leaf]

def program(log, x):
    x.view(-1).add_(0.5)
    return x.exp()
"""


def test_gradients_of_one_call_are_not_those_of_another() -> None:
    """The second backward, through what the first has freed, raises in plain PyTorch alone."""
    assert check(_TWO_CALLS).kind == "lenient"
