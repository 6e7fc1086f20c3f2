"""What torch's pages say of finding troubles, with this project's names: settings, variables and commands as they stand
there, run as a user runs them. The samples in Python are in ``tests/capture/test_reference_*.py``; those of the
minimizer in ``tests/minimizer/test_write_failures.py``, of ``replay`` in ``test_replay.py``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradsplit
from tests.forked_ranks import run_forked
from tests.start_ranks import python_path

_MODEL = """
import torch, gradsplit

def inner(x, n):
    return (x.sin() * n).cumsum(0)

def toy_example(x, n):
    y = inner(x, n)
    print("woo")
    return y.cos().sum()

compiled = gradsplit.compile(toy_example)
for n in (2, 3, 4):
    compiled(torch.ones(n + 1, 4, requires_grad=True), n).backward()
"""


@pytest.fixture(autouse=True)
def nothing_compiled():
    gradsplit.reset()


def _run(folder: Path, *command: str, **variables: str) -> str:
    """``env NAME=VALUE python your_model.py``; what is said on stderr."""
    (folder / "your_model.py").write_text(_MODEL)
    variables = {"PYTHONPATH": python_path(), "GRADSPLIT_CACHE": str(folder / "cache"), **variables}
    if "TORCH_LOGS" in variables:  # torch reads it, too, when it is imported
        run = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    else:
        run = run_forked(command, folder, **variables)
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.timeout(300)
def test_logs_are_chosen_by_the_names_of_torch(tmp_path: Path):
    said = _run(tmp_path, "your_model.py", TORCH_LOGS="guards,dynamic,perf_hints,recompiles,+graph_breaks")
    for text in (
        "[gradsplit guards] toy_example: ",
        "[gradsplit dynamic] sizes of x: 3 was first, now 4",
        "[gradsplit recompiles] toy_example: not: ",
        "[gradsplit perf_hints] ",
        "[gradsplit graph_breaks] toy_example: [call-without-rule]",
    ):
        assert text in said, text
    assert "[gradsplit output_code]" not in said


@pytest.mark.timeout(300)
def test_only_functions_of_the_desired_name_are_compiled(tmp_path: Path):
    said = _run(tmp_path, "your_model.py", GRADSPLIT_DEBUG_FUNCTION="inner", GRADSPLIT_LOGS="graph_code")
    assert "[gradsplit graph_code] inner:" in said and "toy_example" not in said


@pytest.mark.timeout(300)
def test_a_debug_folder_has_graphs_kernels_and_breaks(tmp_path: Path):
    _run(tmp_path, "your_model.py", GRADSPLIT_DEBUG="debug")
    _run(tmp_path, "-m", "gradsplit.report", "debug")
    found = json.loads((tmp_path / "debug" / "report.json").read_text())
    graph = found["graphs"][0]
    assert "sin" in {node["target"] for node in graph["captured"]}
    assert "gradsplit_kernel" in graph["kernels"][0]["text"] and graph["joint"] and graph["loops"]
    assert 'print("woo")' in found["breaks"][0]["stack"][-1]["text"]
    assert found["recompilations"]


def _fails(x):
    y = x + 1
    print("woo")
    return y


def test_verbose_shows_the_stack_of_the_compiler_and_of_the_program(caplog):
    with gradsplit.config.patch(verbose=True):
        gradsplit.compile(_fails, backend="eager")(torch.ones(2))
    (warned,) = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert 'in _fails\n    print("woo")' in warned
    assert "Traceback (most recent call last)" in warned and "/compile_core/capture/" in warned


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_each_level_of_the_log_prints_more(level: int, caplog):
    with gradsplit.config.patch(log_level=level):
        gradsplit.compile(_fails, backend="eager")(torch.ones(2))
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("gradsplit"))
    assert ("LOAD_FAST x  # y = x + 1" in said) == (level <= logging.DEBUG)
    assert ("_fails: captured\nl_x_" in said) == (level <= logging.INFO)
    assert ("_fails is not captured in full" in said) == (level <= logging.WARNING)


def test_random_numbers_are_eagers_where_that_is_asked_for():
    def f(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.ones(64)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    assert torch.equal(gradsplit.compile(f, options={"fallback_random": True})(x), expected)


def test_options_of_the_reference_page(caplog):
    @gradsplit.compile(options={"triton.cudagraphs": True}, fullgraph=True)
    def foo(x):
        return torch.sin(x) + torch.cos(x)

    x = torch.randn(4)
    assert torch.allclose(foo(x), x.sin() + x.cos(), atol=1e-6)
    modes, options = gradsplit.list_mode_options(), gradsplit.list_options()
    assert set(modes) == {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"}
    assert (
        modes["reduce-overhead"] == {"triton.cudagraphs": True} and modes["max-autotune"]["triton.cudagraphs"]
    )
    named = {"epilogue_fusion", "max_autotune", "fallback_random", "shape_padding", "triton.cudagraphs"}
    assert named | {"trace.enabled", "trace.graph_diagram"} <= set(options)
