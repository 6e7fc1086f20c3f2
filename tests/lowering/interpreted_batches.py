"""Batches in Triton's interpreter, on CPU tensors, against torch.

Run by ``test_triton_batches.py`` in a process of its own: the interpreter is chosen by an environment variable before
Triton is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.lowering.build import generate
from tests.lowering.batch_programs import (
    PROGRAMS,
    averages_in_place,
    batch_program,
    batches,
    momentum_in_place,
)
from tests.lowering.interpreted_kernels import link_interpreted
from tests.lowering.lowering_harness import compare


@pytest.mark.parametrize("name", PROGRAMS)
def test_batch(name: str, tmp_path: Path) -> None:
    function, inputs, _ = PROGRAMS[name]
    program = batch_program(name)
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    run = link_interpreted(program, sources, tmp_path)
    flat = tree_leaves(inputs)
    compare(run([*flat]), tree_leaves(function(*inputs)))


def test_new_values_are_stored_where_the_old_ones_are(tmp_path: Path) -> None:
    sizes = [(3, 5), (7,), (2, 16), (300,)]
    program = momentum_in_place(*sizes)
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    run = link_interpreted(program, sources, tmp_path)
    parameters, gradients, momenta = ([torch.randn(size) for size in sizes] for _ in range(3))
    new = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
    expected = [*(p - 0.1 * m for p, m in zip(parameters, new, strict=True)), *new]
    results = run([*parameters, *gradients, *momenta])
    for result, given in zip(results, [*parameters, *momenta], strict=True):
        assert result is given
    compare(results, expected)


def test_new_values_that_are_sums_are_copied(tmp_path: Path) -> None:
    lengths = (64, 7, 1, 96, 300)
    program = averages_in_place(*lengths)
    copies = [batch for batch in batches(program) if batch.name.startswith("copy_to_")]
    assert sum(len(batch.members) for batch in copies) >= 4
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    run = link_interpreted(program, sources, tmp_path)
    matrices, averages = [torch.randn(4, n) for n in lengths], [torch.randn(n) for n in lengths]
    expected = [0.9 * a + 0.1 * m.mean(0) for a, m in zip(averages, matrices, strict=True)]
    results = run([*matrices, *averages])
    assert all(result is given for result, given in zip(results, averages, strict=True))
    compare(results, expected)
