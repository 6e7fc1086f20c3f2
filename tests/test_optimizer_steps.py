"""A compiled ``opt.step()`` over all parameters: few kernels, and eager's values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import gradsplit
from gradsplit.compile_core.backends import generated_kernels as default_backend
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.step_effects import writes

SHAPES = [(8, 8), (8,), (8, 32), (32,), (3, 5), (1,), (2, 2, 2), (8, 8), (8,), (8, 8)]

Optimizers = dict[str, Callable[[list[torch.nn.Parameter], bool], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=0.1, foreach=foreach),
    "sgd_decay": lambda p, foreach: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=foreach),
    "nesterov": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.Adam(p, lr=0.01, foreach=foreach),
    "amsgrad": lambda p, foreach: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=foreach),
    "adamw": lambda p, foreach: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=foreach),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[LoopProgram]:
    """What is linked while the test runs."""
    linked: list[LoopProgram] = []
    original = default_backend.link_program

    def noting(program: LoopProgram, *others):
        linked.append(program)
        return original(program, *others)

    monkeypatch.setattr(default_backend, "link_program", noting)
    return linked


def check_steps(plain: list[torch.nn.Parameter], name: str, foreach: bool) -> None:
    """Four steps of an optimizer, plain and compiled, on the same gradients."""
    ours = copy.deepcopy(plain)
    plain_optimizer, our_optimizer = (OPTIMIZERS[name](parameters, foreach) for parameters in (plain, ours))
    step = gradsplit.compile(our_optimizer.step)
    for _ in range(4):
        for one, other in zip(plain, ours, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        plain_optimizer.step()
        step()
        for one, other in zip(plain, ours, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [False, True], ids=["one_by_one", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_a_handful_of_kernels(name: str, foreach: bool, programs: list[LoopProgram]) -> None:
    plain = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    check_steps(plain, name, foreach)
    for program in programs:
        assert not [step for step in program.steps if isinstance(step, ExternCall)]
        assert len(program.steps) <= 8
    assert programs


@pytest.mark.gpu
def test_a_step_on_a_gpu_stores_new_values_in_place(programs: list[LoopProgram]) -> None:
    """The counts of steps stay on the CPU; what kernels need of them is copied together."""
    plain = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    check_steps(plain, "adamw", True)
    last = programs[-1]
    kernels = [step for step in last.steps if not isinstance(step, ExternCall)]
    assert sum(last.buffers[min(writes(kernel))].device.type == "cuda" for kernel in kernels) <= 8
    assert len(last.overwritten) >= 3 * len(SHAPES)
