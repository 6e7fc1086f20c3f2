"""Column sums in the kernel of their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import BandNest, LoopNest, LoopProgram, Refusal, Store, View
from gradsplit.compile_core.ir.step_effects import writes
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.build import generate
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.tiling.tiling_split import split_reductions
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from tests.lowering.band_programs import inputs_of, norm_backward
from tests.lowering.loop_evaluator import evaluate
from tests.lowering.product_programs import on

GPU = torch.device("cuda", 0)


def joined(program: LoopProgram) -> LoopProgram:
    result = split_reductions(join_column_sums(on(GPU, program)))
    verify_program(result)
    return result


def test_sums_join_their_rows() -> None:
    program = norm_backward()
    result = joined(program)
    bands, *seconds = result.steps
    assert isinstance(bands, BandNest) and len(bands.sums) == 4
    assert [step.name for step in seconds if isinstance(step, LoopNest)] == ["sums", "before"]
    # Only the sums read it.
    assert "gradient" not in result.buffers
    inputs = inputs_of(program)
    expected = evaluate(program, inputs)
    torch.testing.assert_close(
        evaluate(on(torch.device("cpu"), result), inputs), expected, rtol=1e-4, atol=1e-4
    )


def test_rows_may_be_for_their_sums_alone() -> None:
    """Where nobody wants the gradient of what is normalised."""
    program = norm_backward()
    wanted = tuple(view for view in program.outputs if view is not None and view.buffer == "dbias_before")
    (bands, *_) = joined(replace(program, outputs=wanted)).steps
    assert isinstance(bands, BandNest) and not any(isinstance(s, Store) for s in bands.rows.body)


def test_what_others_read_is_stored() -> None:
    program = norm_backward()
    spec = program.buffers["gradient"]
    returned = View("gradient", spec.shape, spec.stride)
    result = joined(replace(program, outputs=(*program.outputs, returned)))
    assert "gradient" in writes(result.steps[0])


@pytest.mark.parametrize("shape", [(1000, 40), (1031, 40), (1024, 9000)], ids=["few", "prime", "long"])
def test_other_rows_stay_apart(shape: tuple[int, int]) -> None:
    assert not any(isinstance(step, BandNest) for step in joined(norm_backward(*shape)).steps)


def test_sums_of_what_the_rows_overwrite_stay_apart() -> None:
    program = norm_backward()
    rows, sums, before = program.steps
    earlier = replace(program, steps=(sums, rows, before), inputs=(*program.inputs, "gradient"))
    (*_, bands, second) = join_column_sums(on(GPU, earlier)).steps
    assert isinstance(bands, BandNest) and len(bands.sums) == 1
    assert isinstance(second, LoopNest) and second.name == "before"


def test_reasons_are_kept() -> None:
    program = on(GPU, norm_backward(1031, 40))
    apart = Refusal("rows", "sums", 100, "they reduce over different axes")
    (better,) = join_column_sums(replace(program, unfused=(apart,))).unfused
    assert "too few or too long" in str(better)
    assert not join_column_sums(replace(on(GPU, norm_backward()), unfused=(apart,))).unfused


def test_the_kernel_compiles_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = joined(norm_backward(8192, 768))
    kernel = compile_triton_for(generate(program.steps[0], program.buffers), ("cuda", 90, 32), tmp_path)
    assert "ld.global.v4" in kernel.asm["ptx"] and "ld.local" not in kernel.asm["ptx"]
