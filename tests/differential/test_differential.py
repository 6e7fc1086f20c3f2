"""A few random programs on each run; ``python -m tests.differential`` runs as many as one likes."""

import math
from pathlib import Path

import pytest
import torch

import gradsplit
from tests.differential.compare import check
from tests.differential.reduce_program import reduce_program
from tests.differential.search import Search, Worker
from tests.differential.write_program import ProgramWriter, with_open_sizes, write_program

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


# At three sizes each, the last of them none.
_OF_OPEN_SIZES = (0, 1, 18, 121, 277, 399, 408, 656, 756)


@pytest.mark.parametrize("seed", _OF_OPEN_SIZES)
def test_a_random_program_is_the_same_compiled_once_for_all_sizes(seed: int) -> None:
    verdict = check(with_open_sizes(write_program(seed), meanwhile=seed % 2 == 1))
    assert not verdict.is_finding, verdict


def test_what_crashes_or_is_luck_in_plain_pytorch_is_no_finding(tmp_path: Path) -> None:
    search = Search(tmp_path, tmp_path, 60.0, 0, False)
    # The writing crashes; memory behind a tensor's own was read; memory that nobody wrote was read.
    search.run([{"seed": 19025}, {"seed": 6040}, {"seed": 1517}], 1)
    assert not search.findings and sum(search.kinds.values()) == 3


def test_rounding_that_decides_is_no_finding() -> None:
    """A sum whose last bit decides which bin it is counted in."""
    program = """
import torch
OPTIONS, BACKWARD, CHOSEN, CALLS = {}, "grad", "all", 1
def state():
    a = torch.randn((2, 4), dtype=torch.float64, generator=torch.Generator().manual_seed(430355))
    return [a], [a]
def program(log, a):
    return torch.histc(a.sum(dtype=torch.float32), 4)
"""
    assert check(program).kind in ("same", "sensitive")


def test_a_program_that_hangs_is_found_with_what_it_waits_for(tmp_path: Path) -> None:
    program = """
import subprocess, torch
OPTIONS, BACKWARD, CHOSEN, CALLS = {}, "grad", "all", 1
def state():
    a = torch.ones(2)
    return [a], [a]
def program(log, a):
    subprocess.run(["sleep", "60"])
    return a
"""
    worker = Worker(tmp_path, 0, 15.0, False)
    answer = worker.ask({"source": program})
    assert answer["kind"] == "hang" and "subprocess.py" in answer["detail"]
    assert "(state S" in answer["detail"] and "sleep 60" in answer["detail"]


def test_zeros_without_memory_as_a_gradient() -> None:
    """Which stay zeros whatever they are multiplied with."""

    def signs(x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.tensordot(x, x, 1) if factor else (x.T[:, :1] / 0).mul_(math.inf)
        return y.sgn()

    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    for factor in (1.0, 0.0):
        result = gradsplit.compile(signs)(x, factor)
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.zeros_like(x))


def test_no_program_reads_what_resizing_adds() -> None:
    writer = ProgramWriter(0)
    writer.scope["t"] = torch.zeros(2)
    assert writer.run("t.resize_((1, 1))") is None
    assert writer.run("t.resize_((2, 1))") is None
    assert writer.run("t.resize_((3, 1))") is not None


_HOOK_OF_ONE_RESULT = """
import torch
OPTIONS, CALLS, BACKWARD, CHOSEN = {}, 1, "weights", "all"

def state():
    leaf = torch.arange(6.0).view(2, 3).requires_grad_()
    return [leaf], [leaf]

def program(log, x):
    log.append("here")
    var, mean = torch.var_mean(x, 1)
    mean.register_hook(lambda g: log.append(("hook", g)))
    return var.sin()
"""


def test_a_hook_need_not_be_called_without_a_gradient() -> None:
    assert check(_HOOK_OF_ONE_RESULT).kind == "same"
    assert check(_HOOK_OF_ONE_RESULT.replace("return var", "return mean")).kind == "same"


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
