"""The stages behind capture as a backend of ``torch.compile``."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gradsplit.compile_core.interface.graph_compiler import gradsplit

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def fresh_front_end():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.outer = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(torch.relu(self.norm(self.inner(x))))


def test_the_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["gradsplit"].partition(":")
    assert getattr(importlib.import_module(module), name) is gradsplit


def test_a_module_trains_under_torchs_front_end():
    plain, model = Small(), Small()
    model.load_state_dict(plain.state_dict())
    seen = []

    def counting(gm, examples):
        seen.append(gm)
        return gradsplit(gm, examples)

    compiled = torch.compile(model, backend=counting)
    for size in (5, 5, 7, 9):
        x = torch.randn(size, 6)
        for module in (plain, compiled):
            module.zero_grad()
            module(x).square().sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)
        assert torch.allclose(plain.norm.running_mean, model.norm.running_mean, atol=1e-6)
    assert len(seen) == 2  # torch makes the size symbolic at the second one


def test_its_options_arrive(tmp_path):
    compiled = torch.compile(
        lambda x: x.sin() * 2, backend=gradsplit, dynamic=False, options={"trace_folder": str(tmp_path)}
    )
    compiled(torch.ones(3))
    assert list(tmp_path.glob("*.joint.txt"))


def test_symbolic_sizes_are_specialised():
    def scaled(x):
        return x * x.shape[0] + torch.ones(x.shape[0])[:, None]

    compiled = torch.compile(scaled, backend=gradsplit, dynamic=True)
    for size in (3, 4, 5, 4):
        x = torch.randn(size, 2, requires_grad=True)
        result = compiled(x)
        assert torch.allclose(result, scaled(x))
        result.sum().backward()
        assert torch.equal(x.grad, torch.full((size, 2), float(size)))


def test_results_that_are_numbers_run_with_torchs_kernels(caplog):
    compiled = torch.compile(lambda x: (x + 1, x.shape[0] * 2), backend=gradsplit, dynamic=True)
    result, number = compiled(torch.ones(3))
    assert number == 6 and torch.equal(result, torch.full((3,), 2.0))


def test_inputs_that_overlap_are_changed_as_in_eager():
    def write(a, b):
        a.add_(1)
        return a + b

    compiled = torch.compile(write, backend=gradsplit, dynamic=False)
    one, other = torch.zeros(2), torch.ones(2)
    assert torch.equal(compiled(one, other), torch.full((2,), 2.0))
    base, plain = torch.zeros(3), torch.zeros(3)
    assert torch.equal(compiled(base[:2], base[1:]), write(plain[:2], plain[1:]))
    assert torch.equal(base, plain)


def test_conjugated_inputs_run_with_torchs_kernels(caplog):
    compiled = torch.compile(lambda z: z * 2, backend=gradsplit, dynamic=False)
    z = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(compiled(z), z * 2)


def test_installed_it_is_known_to_torch_by_name(tmp_path):
    """In a process of its own, since torch looks for entry points once."""
    information = tmp_path / "gradsplit_for_test-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gradsplit-for-test\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\ngradsplit = gradsplit.compile_core.interface.graph_compiler:gradsplit\n"
    )
    program = (
        "import torch\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "torch.compile(lambda x: (x * 3).sum(), backend='gradsplit')(x).backward()\n"
        "assert torch.equal(x.grad, torch.full((3,), 3.0))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=100
    )


def block(x, w):
    return (x @ w).sin() @ w


save_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


@pytest.mark.parametrize(
    ("program", "products"),
    [
        (lambda x, w: checkpoint(block, x * 2, w, use_reentrant=False), 5),
        (lambda x, w: checkpoint(block, x * 2, w, use_reentrant=False, context_fn=save_products), 4),
        (lambda x, w: torch.cond(x.sum() > 0, lambda a: a @ w, lambda a: a * w, (x,)).sin() @ w, 2),
    ],
)
def test_checkpoints_and_branches_of_torchs_front_end(program, products):
    made = []

    def remembering(gm, examples):
        made.append(gradsplit(gm, examples))
        return made[-1]

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    result = torch.compile(program, backend=remembering, fullgraph=True)(x, w)
    expected = program(x, w)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), (x, w)) for value in (result, expected)))
    ((graph,),) = [compiled.programs for compiled in made]
    targets = [node.target for node in graph.partitioned.backward.graph.nodes]
    assert targets.count(torch.ops.aten.mm.default) == products
