"""Rows that are padded: the same numbers, aligned addresses, and the layouts of the outside left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import compile_core
from compile_core.ir.loops import LoopProgram
from compile_core.ir.verify_loops import verify_program
from compile_core.lowering.fuse import fuse
from compile_core.lowering.lower import lower
from compile_core.lowering.pad_rows import pad_rows
from compile_core.lowering.tiling_split import split_reductions
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.lowering_harness import calls, compare, compute_of, trace
from tests.lowering.product_programs import on

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def padded(
    function: Callable[..., Any], *inputs: torch.Tensor, with_float32: bool = True
) -> tuple[LoopProgram, set[str]]:
    """The program after padding, checked against torch, and the names of the buffers that were padded."""
    program = on(GPU, split_reductions(fuse(lower(compute_of(trace(function, *inputs))))))
    after = pad_rows(program, with_float32)
    verify_program(after)
    compare(evaluate(on(CPU, after), [*inputs]), tree_leaves(function(*inputs)), 1e-4)
    return after, {name for name, spec in program.buffers.items() if after.buffers[name] != spec}


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def test_a_matrix_between_nests_and_products() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.exp(x) * 0.5
        return scores @ w, scores.t() @ x

    after, names = padded(function, _matrix(700, 101), _matrix(101, 8))
    (name,) = names
    assert after.buffers[name].stride == (104, 1)


def test_a_softmax_over_padded_rows() -> None:
    def function(h: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = h @ w.t()
        slope = torch.softmax(scores, 1) - torch.nn.functional.one_hot(target, 99).to(scores.dtype)
        return slope @ w, slope.t() @ h, torch.log_softmax(scores, 1).gather(1, target[:, None])

    target = torch.arange(800) % 99
    _, names = padded(function, _matrix(800, 16), _matrix(99, 16), target)
    assert len(names) == 2


def test_three_dimensions_are_rows_too() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).view(-1, 77) @ w

    x = torch.randn(10, 100, 77)
    after, names = padded(function, x, _matrix(77, 8))
    assert len(names) == 1 and {after.buffers[name].stride[-2:] for name in names} == {(80, 1)}


def _outside(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores = torch.exp(x)
    return scores, scores @ w


def _aligned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.exp(x[:, :96]) @ w[:96]


def _flat_too(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores = torch.exp(x)
    return scores @ w, scores.view(-1).view(101, 700).cumsum(1)


def test_a_product_that_goes_outside_is_copied_there() -> None:
    def function(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = (h @ w.t()).view(8, 100, 99)
        return scores, torch.logsumexp(scores, 2)

    after, names = padded(function, _matrix(800, 256), _matrix(99, 256))
    assert not names, "what goes outside keeps its layout"
    own = [spec for name, spec in after.buffers.items() if "_rows_" in name]
    assert [spec.stride for spec in own] == [(100, 1)]


def test_a_scaled_product_that_goes_outside() -> None:
    def function(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (h @ w) * 0.25

    after, _ = padded(function, _matrix(800, 256), _matrix(256, 99))
    (call,) = calls(after)
    assert call.keywords == {"beta": 0, "alpha": 0.25} and "_rows_" in call.out["out"].buffer


def test_a_small_product_is_not_worth_a_copy() -> None:
    after, _ = padded(lambda h, w: h @ w.t(), _matrix(800, 32), _matrix(99, 32))
    assert not any("_rows_" in name for name in after.buffers)


@pytest.mark.parametrize("function", [_outside, _aligned, _flat_too])
def test_what_is_left_alone(function: Callable[..., Any]) -> None:
    assert not padded(function, _matrix(700, 101), _matrix(101, 8))[1]


def test_float32_without_tensor_cores() -> None:
    x, w = _matrix(700, 101), _matrix(101, 8)
    assert not padded(lambda x, w: torch.exp(x) @ w, x, w, with_float32=False)[1]
    assert padded(lambda x, w: torch.exp(x) @ w, x.half(), w.half(), with_float32=False)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_head_over_an_odd_vocabulary_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """Loss, scores and gradients against float64, and the paddings in what was compiled."""
    hidden = torch.randn(4, 200, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(1003, 256, device="cuda", dtype=dtype) / 16).requires_grad_()
    target = torch.randint(0, 1003, (4, 200), device="cuda")

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.nn.functional.linear(hidden, weight)
        return torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), target.flatten()), scores

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    scores = torch.nn.functional.linear(*exact)
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten()).backward()
    loss, found = compile_core.compile(head, options={"trace_folder": tmp_path})(hidden, weight)
    loss.backward()
    assert found.is_contiguous()
    for one, other in ((found, scores), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert one is not None and other is not None
        assert (one.double() - other).norm() <= 1e-2 * other.norm()
    texts = {path.name.split(".", 1)[1]: path.read_text() for path in tmp_path.glob("*.loops.txt")}
    assert "@(1008,1)" in texts["forward.loops.txt"] and "@(1008,1)" in texts["backward.loops.txt"]
