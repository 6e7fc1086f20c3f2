"""Random expressions compute what eager does: 200 of them in compiled C++, some in Triton's interpreter;
``make random-programs`` runs more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import LoopProgram
from tests.lowering import random_expressions
from tests.lowering.expressions import Expression, Leaf, Step
from tests.lowering.interpreted_kernels import run_interpreted
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.random_expressions import Checker, check_seeds, difference, expected_results, minimized

CHUNK = 100
MATRIX = Leaf((4, 6), torch.float32, (0, 1), (False, False), (1, 1), 0, "normal", 1)


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_compiled_kernels(first: int, tmp_path: Path) -> None:
    assert check_seeds("cpp", tmp_path, range(first, first + CHUNK)) == {}


def test_what_the_loops_mean(tmp_path: Path) -> None:
    assert check_seeds("loops", tmp_path, range(500, 700)) == {}


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("-m", "tests.lowering.random_expressions", "--runner", "triton", "--count", "100")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu(tmp_path: Path) -> None:
    assert check_seeds("gpu", tmp_path, range(60)) == {}


def test_what_differs_is_found_and_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (Step("exp", (0,)), Step("neg", (1,)), Step("sum", (2,), ((0,), False)), Step("tanh", (2,)))
    expression = Expression((replace(MATRIX, order=(1, 0), steps=(2, 3)),), steps, (3, 4))

    def evaluate_wrongly(program: LoopProgram, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [result * 1.001 for result in evaluate(program, inputs) if result is not None]

    monkeypatch.setattr(random_expressions, "evaluate", evaluate_wrongly)
    checker = Checker("loops", tmp_path)
    small = minimized(checker, expression)
    assert len(small.steps) <= 1 and small.leaves[0].order == (0, 1)
    assert checker.check({0: small})[0].startswith("differs: value 0 is ")


def test_bounds_follow_what_rounding_does() -> None:
    """A difference of equal numbers may be off by more than it is; a quotient may not."""
    cancels = Expression(
        (MATRIX,), (Step("exp", (0,)), Step("add_number", (1,), (3,)), Step("sub", (2, 1))), (3,)
    )
    (result, _) = expected_results(cancels)
    assert difference(result, result.eager + 1e-7) is None
    assert difference(result, result.eager + 1e-4) is not None
    quotient = Expression((MATRIX,), (Step("number_over", (0,), (1,)),), (1,))
    (result, _) = expected_results(quotient)
    assert difference(result, torch.nextafter(result.eager, torch.tensor(torch.inf))) is None
    assert difference(result, result.eager * (1 + 3e-6)) is not None


def test_what_no_step_rounds_equals_eager() -> None:
    chosen = Expression((MATRIX,), (Step("relu", (0,)), Step("permute", (1,), ((1, 0),))), (2,))
    (result, _) = expected_results(chosen)
    assert result.as_eager
    assert difference(result, torch.nextafter(result.eager, torch.tensor(torch.inf))) is not None
    assert difference(result, result.eager.clone()) is None
