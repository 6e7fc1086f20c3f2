"""Batches in Triton's interpreter, on CPU tensors, against torch.

Run by ``test_triton_batches.py`` in a process of its own: the interpreter is chosen by an environment variable before
Triton is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils._pytree import tree_leaves

from compile_core.ir.loops import ExternCall
from compile_core.lowering.build import generate
from tests.lowering.batch_programs import PROGRAMS, batch_program
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
