"""Hooks, modes of torch, markers on functions, and the text of graphs and guards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gradsplit.compile_core.capture.frames.frame import OPCODES
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import Unsupported


def compile_eager(function, **options):
    return CompiledFunction(function, lambda graph, inputs: graph.module, **options)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale


def test_print_of_a_graph():
    compiled = compile_eager(Small(), fullgraph=True)
    compiled(torch.ones(3, 2))
    assert str(compiled.entries[0].captured.graph) == (
        "l_x_: float32[3, 2] cpu = argument\n"
        "p_linear_weight: float32[2, 2] cpu = parameter\n"
        "p_linear_bias: float32[2] cpu = parameter\n"
        "b_scale: float32[2] cpu = buffer\n"
        "linear: float32[3, 2] cpu = F.linear(l_x_, p_linear_weight, p_linear_bias)\n"
        "relu: float32[3, 2] cpu = torch.relu(linear)\n"
        "mul: float32[3, 2] cpu = operator.mul(relu, b_scale)\n"
        "return (mul)"
    )
    node = next(iter(reversed(compiled.entries[0].captured.graph.module.graph.nodes))).args[0][0]
    assert "self.linear(x)" in node.meta["stack_trace"]


def test_forward_hooks_are_inlined_and_guarded():
    model = Small()
    compiled = compile_eager(model, fullgraph=True)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), model(x))
    handles = [
        model.linear.register_forward_hook(lambda module, args, result: result + 1),
        model.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    ]
    assert torch.equal(compiled(x), model(x))
    for handle in handles:
        handle.remove()
    assert torch.equal(compiled(x), model(x))
    assert len(compiled.entries) == 2


def test_backward_hooks_run_as_plain_python():
    model = Small()
    seen = []
    model.linear.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(1))
    compiled = compile_eager(model)
    compiled(torch.randn(3, 2, requires_grad=True)).sum().backward()
    assert seen == [1]
    with pytest.raises(Unsupported, match="module-hooks"):
        compile_eager(model, fullgraph=True)(torch.randn(3, 2))


def test_hooks_of_the_compiled_module_itself():
    model = Small()
    compiled = compile_eager(model)
    x = torch.randn(3, 2)
    compiled(x)
    model.register_forward_hook(lambda module, args, result: result + 1)
    assert torch.equal(compiled(x), model(x))


def test_vmap_and_grad_transforms_run_plain():
    compiled = compile_eager(lambda x: x.sin() * 2)
    x = torch.randn(3)
    assert torch.equal(compiled(x), x.sin() * 2)
    batched = torch.randn(4, 3)
    assert torch.equal(torch.func.vmap(compiled)(batched), batched.sin() * 2)
    assert torch.allclose(torch.func.grad(lambda v: compiled(v).sum())(x), 2 * x.cos())


def test_grad_mode_is_guarded():
    compiled = compile_eager(lambda x: x * 2, fullgraph=True)
    x = torch.ones(1, requires_grad=True)
    assert compiled(x).requires_grad
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert len(compiled.entries) == 2


def test_tensor_subclass_with_operators_of_its_own_runs_plain():
    """One that does not tell what it wraps."""

    class Own(torch.Tensor):
        @staticmethod
        def __new__(cls, value):
            made = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)
            made.value = value
            return made

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*(arg.value if type(arg) is cls else arg for arg in args), **(kwargs or {})) * 2

    compiled = compile_eager(lambda x: x + 1)
    assert compiled(Own(torch.ones(2))).tolist() == [4.0, 4.0]
    assert compiled.break_reasons[0].reason_id == "tensor-subclass"


def test_overlapping_inputs_that_are_written_to_run_plain():
    def write(a, b):
        a.add_(1)
        return a + b

    compiled, plain = compile_eager(write), write
    one, other = torch.zeros(2), torch.ones(2)
    assert torch.equal(compiled(one, other), torch.full((2,), 2.0))
    base = torch.zeros(3)
    expected_base = torch.zeros(3)
    result = compiled(base[:2], base[1:])
    assert torch.equal(result, plain(expected_base[:2], expected_base[1:]))
    assert torch.equal(base, expected_base)
    assert compiled.break_reasons[0].reason_id == "overlapping-inputs"


def test_compiled_function_inside_another_is_inlined():
    inner = compile_eager(lambda x: x + 1)
    outer = compile_eager(lambda x: inner(x) * 2, fullgraph=True)
    assert torch.equal(outer(torch.ones(1)), torch.full((1,), 4.0))
    assert not inner.entries


def test_methods_and_threads():
    class Holder:
        scale = 2

        @compile_eager
        def run(self, x):
            return x * self.scale

    holder = Holder()
    results = []
    threads = [threading.Thread(target=lambda: results.append(holder.run(torch.ones(2)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(result, torch.full((2,), 2.0)) for result in results)
    holder.scale = 3
    assert torch.equal(holder.run(torch.ones(2)), torch.full((2,), 3.0))


def test_changed_defaults_and_dictionary_iteration():
    def grow(x, table):
        for key in table:
            table[key + "'"] = x
        return x

    compiled = compile_eager(grow, fullgraph=True)
    with pytest.raises(RuntimeError, match="changed size"):
        compiled(torch.ones(1), {"a": 1})


def test_lambda_with_nonlocal_store_writes_to_its_own_cell():
    def apply(f, x):
        return f(x)

    def make():
        total = 0

        def add(x):
            nonlocal total
            total += 1
            return x + total

        return add, lambda: total

    compiled = compile_eager(apply, fullgraph=True)
    (one, first), (other, second) = make(), make()
    compiled(one, torch.zeros(1))
    compiled(other, torch.zeros(1))
    assert (first(), second()) == (1, 1)
    assert len(compiled.entries) == 1


class Settings(dict):
    """Attribute access that fails in an unusual way, as some configuration classes do."""

    __getattr__ = dict.__getitem__


SETTINGS = Settings(scale=2)


def test_capture_runs_no_code_of_user_objects():
    compiled = compile_eager(lambda x: x * SETTINGS.scale)
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
    assert not compiled.break_reasons


def test_a_bug_of_the_capture_makes_the_function_plain(monkeypatch, caplog):
    monkeypatch.setitem(OPCODES, "RETURN_VALUE", lambda frame, instruction: 1 / 0)
    compiled = compile_eager(lambda x: x + 1)
    for _ in range(2):
        assert torch.equal(compiled(torch.zeros(1)), torch.ones(1))
    assert len(compiled.entries) == 1 and compiled.break_reasons[0].reason_id == "capture-failed"
