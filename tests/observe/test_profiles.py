"""What torch's profiler shows of compiled programs."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from gradsplit.compile_core import artifact_logs


def softened(x):
    y = x.tanh()
    return y * 3


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_profiler_sees_kernels_by_what_they_compute_and_the_operators_called_in_c():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    compiled = gradsplit.compile(model)
    x = torch.randn(4, 8)
    compiled(x).sum().backward()
    with torch.profiler.profile(acc_events=True) as profiler:
        compiled(x).sum().backward()
    (forward,) = [event for event in profiler.events() if event.name == "CompiledCall"]
    names = [event.name for event in profiler.events() if event.cpu_parent is forward]
    assert names[::2] == ["aten::addmm", "aten::addmm"] and "erf" in names[1]
    assert "aten::mm" in [event.name for event in profiler.events()]  # of the backward


def test_the_source_of_a_kernel_names_the_lines_that_it_computes(capfd):
    artifact_logs.choose_logs(["output_code"])
    try:
        x = torch.randn(4, 8, requires_grad=True)
        gradsplit.compile(softened)(x).sum().backward()
    finally:
        artifact_logs.choose_logs([])
    code = capfd.readouterr().err
    first = softened.__code__.co_firstlineno
    lines = [f"// {__file__}:{first + 1} y = x.tanh()", f"// {__file__}:{first + 2} return y * 3"]
    forward, backward = code.split("// fused_")[1:3]
    assert all(line in forward for line in lines)
    assert lines[0] in backward
