"""Nests that do the same to other buffers become one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, LoopProgram, NestBatch
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.lowering.fusion import batch_nests as batching
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.overwrite_inputs import overwrite_inputs
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.runtime.link_program import link_program
from tests.lowering.lowering_harness import check, compute_of, trace

aten = torch.ops.aten
SIZES = [(3, 5), (7,), (), (0, 4), (1,), (2, 3, 4), (300, 70)]


def program_of(function: Callable[..., Any], *inputs: Any) -> LoopProgram:
    return batch_nests(fuse(lower(compute_of(trace(function, *inputs)))))


def batches(program: LoopProgram) -> list[int]:
    return sorted(len(step.members) for step in program.steps if isinstance(step, NestBatch))


def run(program: LoopProgram, inputs: list[Tensor], folder: Path) -> Any:
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    return link_program(program, sources, build(sources, folder)).run(list(inputs))


def momentum(xs: list[Tensor], ys: list[Tensor], rate: Tensor) -> list[Tensor]:
    buffers = aten._foreach_add(aten._foreach_mul(xs, 0.9), ys)
    return [*buffers, *(x - rate * buffer for x, buffer in zip(xs, buffers, strict=True))]


def lists(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return (
        [torch.randn(size).to(dtype) for size in SIZES],
        [torch.randn(size).to(dtype) for size in SIZES],
        torch.tensor(0.1, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lists_of_any_sizes_are_one_kernel(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = lists(dtype)
    program = program_of(momentum, *inputs)
    assert batches(program) == [
        2,
        4,
    ]  # those of one element, which have no axis, and the others but the empty one
    apart = fuse(lower(compute_of(trace(momentum, *inputs))))
    assert batches(apart) == []
    flat = [*inputs[0], *inputs[1], inputs[2]]
    for together, alone in zip(run(program, flat, tmp_path), run(apart, flat, tmp_path), strict=True):
        assert torch.equal(together, alone)


def test_threads_share_a_batch(tmp_path: Path) -> None:
    xs = [torch.randn(size) for size in (1, 70_000, 3, 200_000, 1, 130_001)]
    program = program_of(lambda xs: aten._foreach_exp(xs), xs)
    assert batches(program) == [2, 4]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = run(program, xs, tmp_path)
    finally:
        torch.set_num_threads(before)
    for actual, x in zip(results, xs, strict=True):
        torch.testing.assert_close(actual, x.exp())


def test_nothing_but_empty_tensors(tmp_path: Path) -> None:
    xs = [torch.randn(0), torch.randn(3, 0)]
    results = run(program_of(lambda xs: aten._foreach_exp(xs), xs), xs, tmp_path)
    assert [result.shape for result in results] == [x.shape for x in xs]


def test_numbers_without_axes_are_a_batch(tmp_path: Path) -> None:
    """The counts of steps that optimizers keep."""
    counts = [torch.tensor(float(k)) for k in range(5)]
    program = program_of(lambda xs: aten._foreach_add(xs, 1), counts)
    assert batches(program) == [5]
    assert [float(count) for count in run(program, counts, tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_one_needs_of_another_keeps_them_apart() -> None:
    def chain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first = a.exp()
        through = torch.mm(first.view(4, 4), b)  # a call between, so that nothing is fused
        return first, through, through.exp()

    program = check(chain, torch.randn(16), torch.randn(4, 4))
    assert batches(batch_nests(program)) == []


def test_two_batches_of_a_chain() -> None:
    def chains(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [torch.mm(torch.mm(x.exp(), w).exp(), w) for x in xs]

    program = check(chains, [torch.randn(4, 4), torch.randn(6, 4), torch.randn(8, 4)], torch.randn(4, 4))
    assert batches(batch_nests(program)) == [3, 3]


def test_a_batch_orders_what_was_in_no_order() -> None:
    def chains(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        early = ((x.sin() @ w).exp()) @ w
        return early, (y.exp() @ w).sin() @ w

    # The batch of the sines waits for the second exponential, and the first one waits for the batch.
    assert batches(program_of(chains, torch.randn(4, 4), torch.randn(6, 4), torch.randn(4, 4))) == [2]


def test_other_constants_are_other_loops() -> None:
    def signed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x > 0, x, 0.0), torch.where(y > 0, y, -0.0)

    assert batches(batch_nests(check(signed, torch.randn(5), torch.randn(6)))) == []


def test_other_dtypes_are_other_loops() -> None:
    program = check(lambda x, y: (x + 1, y + 1), torch.randn(5), torch.randn(6).double())
    assert batches(batch_nests(program)) == []


def test_members_run_before_the_first_that_reads_them() -> None:
    def products(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [torch.mm(x.exp(), w) for x in xs]

    program = program_of(
        products, [torch.randn(4, 4), torch.randn(6, 4), torch.randn(8, 4)], torch.randn(4, 4)
    )
    assert [type(step) for step in program.steps] == [NestBatch, ExternCall, ExternCall, ExternCall]


def test_members_wait_for_what_the_last_one_reads() -> None:
    def products(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [torch.mm(x, w).exp() for x in xs]

    program = program_of(
        products, [torch.randn(4, 4), torch.randn(6, 4), torch.randn(8, 4)], torch.randn(4, 4)
    )
    assert [type(step) for step in program.steps] == [ExternCall, ExternCall, ExternCall, NestBatch]


def test_what_does_not_move_stays_where_it_is() -> None:
    def program(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        product = torch.mm(w, w)
        return [product, xs[0].exp(), torch.mm(product, product), xs[1].exp(), torch.mm(w, product)]

    batched = program_of(program, [torch.randn(4), torch.randn(6)], torch.randn(4, 4))
    assert [type(step) for step in batched.steps] == [ExternCall, ExternCall, NestBatch, ExternCall]


def test_results_are_not_made_long_before_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the zeros of tables' gradients, which lay in memory beside all activations."""

    def program(w: Tensor) -> list[Tensor]:
        first = torch.mm(torch.zeros(4, 4), w)
        return [torch.mm(first, w), *(torch.zeros(size, 4) for size in (6, 8, 9))]

    monkeypatch.setattr(batching, "_MOST_HELD_BYTES", 50)
    batched = program_of(program, torch.randn(4, 4))
    assert [type(step) for step in batched.steps] == [LoopNest, ExternCall, ExternCall, NestBatch]


@pytest.mark.parametrize("reads_temporaries", [True, False])
def test_batches_hold_few_bytes(reads_temporaries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def products(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [torch.mm(x, w).exp() if reads_temporaries else torch.mm(x.exp(), w) for x in xs]

    inputs = [torch.randn(8, 8) for _ in range(6)], torch.randn(8, 8)
    assert batches(program_of(products, *inputs)) == [6]
    # The one that does not move holds nothing.
    monkeypatch.setattr(batching, "_MOST_HELD_BYTES", 2 * 8 * 8 * 4)
    assert batches(program_of(products, *inputs)) == [3, 3]


def test_inputs_that_wait_for_a_batch_are_held() -> None:
    """Activations that the backward reads for the last time."""

    def program(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        results = []
        for x in xs:
            w = torch.mm(w, w)
            results.append(x * w)
        return results

    inputs = [torch.randn(1024, 1024) for _ in range(6)], torch.randn(1024, 1024)
    batched = program_of(program, *inputs)
    assert batches(batched) == [3, 3]  # an input and a product of 4 MiB for each one that waits


def test_what_may_fail_comes_before_new_values_of_inputs() -> None:
    """Else a call that fails would be made again with values that are changed already."""

    def program(a: Tensor, b: Tensor, given: Tensor, w: Tensor) -> list[Tensor]:
        return [a.exp(), torch.mm(w, w), b.exp()]

    compute = compute_of(trace(program, *map(torch.randn, ((5,), (6,), (6,), (2, 2)))))
    compute = replace(compute, replaced={compute.outputs[2]: compute.inputs[2]})
    batched = batch_nests(overwrite_inputs(fuse(lower(compute)), compute))
    assert batched.overwritten
    assert [type(step) for step in batched.steps] == [ExternCall, NestBatch]


def test_a_batch_prints_its_first_nest_and_all_sizes() -> None:
    text = print_program(program_of(lambda xs: aten._foreach_neg(xs), [torch.randn(3), torch.randn(2, 4)]))
    assert "batch fused_neg_0_batch_of_2 of nests like the first, over 3, 8" in text


def test_the_source_does_not_grow_with_the_members() -> None:
    def source(count: int) -> str:
        xs = [torch.randn(k + 1) for k in range(count)]
        program = program_of(lambda xs: aten._foreach_exp(xs), xs)
        return generate(program.steps[0], program.buffers).text  # type: ignore[arg-type]

    assert len(source(100)) < len(source(2)) + 800
