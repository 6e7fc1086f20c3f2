"""Matrix products with epilogues in Triton's interpreter, on CPU tensors, against torch.

Run by ``test_products.py`` in a process of its own: the interpreter is chosen by an environment variable before Triton
is imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.ir.loops import LoopNest, ProductNest
from gradsplit.compile_core.lowering.triton_kernels.codegen_product import generate_product
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from tests.lowering.interpreted_kernels import link_interpreted
from tests.lowering.lowering_harness import compare
from tests.lowering.product_programs import PROGRAMS, product_program


@pytest.mark.parametrize("name", PROGRAMS)
def test_product(name: str, tmp_path: Path) -> None:
    function, inputs, _ = PROGRAMS[name]
    if inputs[0].dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 numbers")
    program, _ = product_program(name)
    sources = [generate_triton(s, program.buffers) for s in program.steps if isinstance(s, LoopNest)]
    sources += [generate_product(s, program.buffers) for s in program.steps if isinstance(s, ProductNest)]
    run = link_interpreted(program, sources, tmp_path)
    compare(run([*inputs]), torch.utils._pytree.tree_leaves(function(*inputs)))
