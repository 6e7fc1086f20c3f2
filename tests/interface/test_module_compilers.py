"""Modules that a plug-in claims: compiled by themselves, wherever a compiled program calls them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.interface import module_compilers
from gradsplit.compile_core.interface.module_compilers import ModuleCompiler, forms_of
from gradsplit.compile_core.interface.testing import CompileCounter


class Claimed(nn.Linear):
    """Of a type that the plug-in below claims."""


class Form:
    """What the plug-in makes: says how it was called."""

    def __init__(self, module: Claimed, request: Any) -> None:
        self.module, self.request, self.calls = module, request, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module.forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    monkeypatch.setattr(module_compilers, "_plugins", lambda: (ModuleCompiler(Claimed, Form),))


def step(model, x):
    return model(x * 2).relu() + 1


def calls_step(model, x):
    return step(model, x) * 3


@pytest.mark.parametrize("function", [step, calls_step])
def test_a_function_runs_the_form_between_its_graphs(function):
    counter = CompileCounter()
    compiled = gradsplit.compile(function, backend=counter)
    model, x = Claimed(2, 2), torch.ones(3, 2)
    for _ in range(2):
        assert torch.equal(compiled(model, x), function(model, x))
    (form,) = forms_of(model)
    assert form.calls == 2 and counter.frame_count >= 2
    assert form.request.backend.compile is counter


def test_programs_with_the_same_settings_share_a_form():
    model, x = Claimed(2, 2), torch.ones(3, 2)
    for function in (step, calls_step):
        gradsplit.compile(function, backend="eager")(model, x)
    gradsplit.compile(nn.Sequential(model, nn.ReLU()), backend="eager")(x)
    (form,) = forms_of(model)
    assert form.calls == 3
    gradsplit.compile(step, backend="aot_eager")(model, x)
    assert len(forms_of(model)) == 2


def test_a_form_that_was_asked_for_replaces_the_earlier_one():
    model, x = Claimed(2, 2), torch.ones(3, 2)
    compiled = gradsplit.compile(step, backend="eager")
    compiled(model, x)
    own = gradsplit.compile(model, backend="eager")
    compiled(model, x)
    compiled(own, x)
    assert forms_of(model) == (own._run,) and own._run.calls == 2


def test_a_disabled_module_stays_disabled():
    model, x = Claimed(2, 2), torch.ones(3, 2)
    gradsplit.compile(step, backend="eager")(gradsplit.disable(model), x)
    assert not forms_of(model)


@pytest.mark.parametrize("function", [step, calls_step])
def test_fullgraph_allows_what_is_compiled_apart(function):
    counter = CompileCounter()
    compiled = gradsplit.compile(function, backend=counter, fullgraph=True)
    model, x = Claimed(2, 2), torch.ones(3, 2)
    assert torch.equal(compiled(model, x), function(model, x))
    assert forms_of(model)[0].request.fullgraph


def test_fullgraph_holds_before_and_behind_it():
    def breaks_before(model, x):
        gradsplit.graph_break()
        return model(x)

    def breaks_behind(model, x):
        x = model(x)
        gradsplit.graph_break()
        return x + 1

    for function in (breaks_before, breaks_behind):
        with pytest.raises(gradsplit.Unsupported, match="asks for a graph break"):
            gradsplit.compile(function, backend="eager", fullgraph=True)(Claimed(2, 2), torch.ones(3, 2))


def test_fullgraph_where_the_frame_cannot_be_left():
    def inside(model, x):
        return next(model(x) for _ in range(1)) + 1

    compiled = gradsplit.compile(inside, backend="eager", fullgraph=True)
    with pytest.raises(gradsplit.Unsupported):
        compiled(Claimed(2, 2), torch.ones(3, 2))


def test_copies_and_pickles_have_forms_of_their_own():
    model, x = Claimed(2, 2), torch.ones(3, 2)
    compiled = gradsplit.compile(step, backend="eager")
    compiled(model, x)
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not forms_of(copied)
        compiled(copied, x)
        (form,) = forms_of(copied)
        assert form.module is copied
    assert forms_of(model)[0].calls == 1


def test_a_plug_in_may_compile_graphs_of_any_function(monkeypatch):
    seen = []

    def compile_graph(captured, inputs, request):
        seen.append((len(captured.inputs), len(inputs), request.fullgraph))
        return captured.module.forward if len(inputs) == 1 else None

    plugin = ModuleCompiler(Claimed, Form, compile_graph)
    monkeypatch.setattr(module_compilers, "_plugins", lambda: (plugin,))
    counter = CompileCounter()
    compiled = gradsplit.compile(lambda *tensors: sum(tensors) * 2, backend=counter, fullgraph=True)
    x = torch.ones(2)
    assert torch.equal(compiled(x), x * 2) and counter.frame_count == 0
    assert torch.equal(compiled(x, x + 1), x * 6) and counter.frame_count == 1
    assert seen == [(1, 1, True), (2, 2, True)]


def test_imports_and_plug_ins_leave_random_numbers_and_gpus_alone():
    """Who finds the GPUs can hide them no more, and no fork of the process can use them."""
    program = """
import random
import torch

def find(*arguments):
    raise AssertionError("GPUs are looked for")

torch._C._accelerator_getAccelerator = torch.cuda.is_available = torch.cuda.device_count = find
random.seed(1)
before = random.getstate()
import gradsplit, gradsplit.bucketing, gradsplit.minimize
gradsplit.compile(torch.nn.Linear(2, 2))
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
