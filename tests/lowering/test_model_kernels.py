"""Every kernel of a training step of small models as a GPU would get it, without one: in Triton's interpreter against
the evaluator of loops, and compiled for sm_90."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from gradsplit.compile_core.toolchain.compile_workers import usable_processors
from tests.lowering.interpreted_kernels import run_interpreted
from tests.lowering.small_models import MODELS


@pytest.mark.multi_process
@pytest.mark.timeout(400)
def test_kernels_of_models_run_in_the_interpreter_and_compile(tmp_path: Path) -> None:
    printed = run_interpreted("-m", "tests.lowering.interpreted_models", str(tmp_path))
    assert all(f"{name}: " in printed for name in MODELS)
    kernels = pickle.loads((tmp_path / "kernels.pickle").read_bytes())
    assert len(kernels) > 60
    with ThreadPoolExecutor(usable_processors()) as pool:
        compiled = pool.map(lambda source: compile_triton_for(source, ("cuda", 90, 32), tmp_path), kernels)
        assert all(kernel.asm["ptx"] for kernel in compiled)
