"""Batches in Triton's interpreter, on CPU tensors, against torch.

Run by ``test_triton_batches.py`` in a process of its own: the interpreter is chosen by an environment variable before
Triton is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from compile_core.ir.loops import ExternCall
from compile_core.lowering.build import generate
from compile_core.runtime.link_program import link_program
from tests.lowering.batch_programs import PROGRAMS, batch_program
from tests.lowering.interpreted_gpt import interpreted
from tests.lowering.lowering_harness import compare
from tests.lowering.product_programs import on

# numpy plays the GPU here, and warns of what overhangs a tile.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", PROGRAMS)
def test_batch(name: str, tmp_path: Path) -> None:
    function, inputs, _ = PROGRAMS[name]
    program = batch_program(name)
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    kernels = {source.name: interpreted(source, tmp_path) for source in sources if 0 not in source.grid}
    kernels |= {source.name: lambda *_: None for source in sources if 0 in source.grid}
    run = link_program(on(torch.device("cpu"), program), sources, kernels)
    flat = tree_leaves(inputs)
    compare(run([*flat]), tree_leaves(function(*inputs)))
