"""``run`` uses what is compiled, ``reset`` forgets it, ``testing`` counts it, ``disable`` leaves code alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import gradsplit
from gradsplit.compile_core.interface.testing import CompileCounter, CompileCounterWithBackend


def scale(x, n):
    return x * n


def test_run_uses_entries_and_makes_none():
    counter = CompileCounter()
    compiled = gradsplit.compile(scale, backend=counter)
    compiled(torch.ones(2), 2)
    for frozen in (gradsplit.run(compiled), gradsplit.run(scale)):
        assert torch.equal(frozen(torch.ones(2), 2), torch.full((2,), 2.0))
        assert torch.equal(frozen(torch.ones(2), 3), torch.full((2,), 3.0))
        assert torch.equal(frozen(torch.ones(5), 2), torch.full((5,), 2.0))
    assert counter.frame_count == 1 and len(compiled.entries) == 1
    assert torch.equal(compiled(torch.ones(2), 3), torch.full((2,), 3.0))
    assert counter.frame_count == 2


def test_run_calls_the_compiled_entry():
    calls = []

    def backend(module, examples):
        def run(*inputs):
            calls.append(len(inputs))
            return module(*inputs)

        return run

    compiled = gradsplit.compile(scale, backend=backend)
    compiled(torch.ones(2), 2)
    frozen = gradsplit.run(compiled)
    frozen(torch.ones(2), 2)
    assert calls == [1, 1]
    frozen(torch.ones(3), 2)
    assert calls == [1, 1]


def test_run_holds_behind_graph_breaks_too():
    def parts(x, n):
        gradsplit.graph_break()
        return helper(x) * n

    def helper(x):
        gradsplit.graph_break()
        return x + 1

    counter = CompileCounter()
    compiled = gradsplit.compile(parts, backend=counter)
    compiled(torch.ones(2), 2)
    before = counter.frame_count
    assert torch.equal(gradsplit.run(compiled)(torch.ones(3), 5), torch.full((3,), 10.0))
    assert counter.frame_count == before


def test_run_of_what_was_never_compiled_and_of_a_module():
    assert torch.equal(gradsplit.run(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))
    model = torch.nn.Linear(2, 2)
    frozen = gradsplit.run(gradsplit.compile(model, backend="eager"))
    assert isinstance(frozen, torch.nn.Linear) and frozen.weight is model.weight
    assert torch.equal(frozen(torch.ones(1, 2)), model(torch.ones(1, 2)))
    with pytest.raises(TypeError, match="callable"):
        gradsplit.run(3)


def test_compilation_goes_on_after_run_raises():
    @gradsplit.run
    def fails(x):
        raise KeyError(x)

    with pytest.raises(KeyError):
        fails(1)
    counter = CompileCounter()
    gradsplit.compile(scale, backend=counter)(torch.ones(2), 2)
    assert counter.frame_count == 1


def test_reset_forgets_every_entry():
    def with_break(x):
        y = x + 1
        gradsplit.graph_break()
        return y * 2

    counter = CompileCounter()
    compiled = gradsplit.compile(with_break, backend=counter)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert counter.frame_count == 2
    gradsplit.reset()
    assert not compiled.entries
    compiled(torch.ones(2))
    assert counter.frame_count == 4
    counter.clear()
    assert (counter.frame_count, counter.op_count) == (0, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
def test_a_counter_hands_graphs_on(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = gradsplit.compile(lambda x: (x * 2).sin(), backend=counter)
    x = torch.randn(3, requires_grad=True)
    result = compiled(x)
    assert torch.allclose(result, (x * 2).sin())
    result.sum().backward()
    assert torch.allclose(x.grad, 2 * (x * 2).cos())
    assert (counter.frame_count, counter.op_count, len(counter.graphs)) == (1, 2, 1)


def test_disable_forms():
    @gradsplit.disable()
    def decorated(x):
        """Adds one."""
        return x + 1

    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Adds one."
    counter = CompileCounter()
    compiled = gradsplit.compile(scale, backend=counter)
    assert torch.equal(gradsplit.disable(compiled)(torch.ones(2), 2), torch.full((2,), 2.0))
    assert counter.frame_count == 0
    model = gradsplit.disable(torch.nn.Linear(2, 2))
    outer = gradsplit.compile(lambda x: model(x * 2) + 1, backend=counter)
    assert torch.equal(outer(torch.ones(1, 2)), model(torch.full((1, 2), 2.0)) + 1)
    assert counter.frame_count == 2 and counter.op_count == 2
    with pytest.raises(TypeError, match="callable"):
        gradsplit.disable(3)


def test_disabled_static_methods_and_class_methods():
    class Model:
        @gradsplit.disable
        @staticmethod
        def static(x):
            return x + 1

        @gradsplit.disable
        @classmethod
        def of_class(cls, x):
            return cls.static(x) + 1

    counter = CompileCounter()
    compiled = gradsplit.compile(lambda x: Model.static(x * 2) + Model.of_class(x), backend=counter)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 6.0))
    assert counter.op_count == 2


def test_a_disabled_class_is_made_and_called_plainly():
    seen = []

    @gradsplit.disable
    class Scaler:
        def __init__(self, factor):
            seen.append(gradsplit.is_compiling())
            self.factor = factor

        def __call__(self, x):
            seen.append(gradsplit.is_compiling())
            return x * self.factor

    def uses(x):
        return Scaler(3)(x + 1) - 1

    compiled = gradsplit.compile(uses, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 5.0))
    assert seen == [False, False]


def test_static_methods_and_class_methods_in_either_order():
    class Model:
        @staticmethod
        @gradsplit.compile(backend="eager")
        def inner_static(x):
            return x + 1

        @gradsplit.compile(backend="eager")
        @staticmethod
        def outer_static(x):
            return x + 2

        @gradsplit.compile(backend="eager")
        @classmethod
        def outer_class(cls, x):
            return cls.outer_static(x) + 1

        @property
        @gradsplit.compile(backend="eager")
        def value(self):
            return torch.ones(2)

    one = torch.ones(2)
    for owner in (Model, Model()):
        assert torch.equal(owner.inner_static(one), one + 1)
        assert torch.equal(owner.outer_static(one), one + 2)
        assert torch.equal(owner.outer_class(one), one + 3)
    assert torch.equal(Model().value, one)


def test_calls_of_the_instances_of_a_class():
    counter = CompileCounter()

    @gradsplit.compile(backend=counter)
    class Scaler:
        def __call__(self, x):
            return x * 2

    @gradsplit.compile(backend=counter)
    class Model(torch.nn.Module):
        def forward(self, x):
            return x * 3

    assert isinstance(Model(), torch.nn.Module) and type(Scaler()) is Scaler
    assert torch.equal(Scaler()(torch.ones(2)), torch.full((2,), 2.0))
    model = Model()
    model.register_forward_hook(lambda module, args, result: result + 1)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 4.0))
    assert counter.frame_count == 2
    with pytest.raises(TypeError, match="has no method __call__"):
        gradsplit.compile(type("Empty", (), {}))


def test_a_module_whose_forward_is_compiled_is_captured_in_one():
    class Inner(torch.nn.Module):
        @gradsplit.compile(backend="eager")
        def forward(self, x):
            return x * 3

    counter = CompileCounter()
    inner = Inner()
    outer = gradsplit.compile(lambda x: inner(x) + 1, backend=counter, fullgraph=True)
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 4.0))
    whole = gradsplit.compile(inner, backend=counter, fullgraph=True)
    assert torch.equal(whole(torch.ones(2)), torch.full((2,), 3.0))
    assert counter.frame_count == 2


@gradsplit.compile(backend="eager")
def known_by_name(x):
    return x + 1


def test_copies_and_pickles():
    assert copy.deepcopy(known_by_name) is copy.copy(known_by_name) is known_by_name
    assert pickle.loads(pickle.dumps(known_by_name)) is known_by_name
    compiled = gradsplit.compile(scale, backend="eager")
    assert pickle.loads(pickle.dumps(compiled)) is scale

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2
            self.scaled = gradsplit.compile(self.multiply, backend="eager")
            self.activation = gradsplit.compile(torch.relu, backend="eager")

        def multiply(self, x):
            return x * self.factor

        def forward(self, x):
            return self.activation(self.scaled(x))

    model = Model()
    model(torch.ones(1))
    other = copy.deepcopy(model)
    other.factor = 5
    assert torch.equal(other(torch.ones(1)), torch.full((1,), 5.0))
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 2.0))


def test_methods_are_compiled_in_a_class_body():
    class Model:
        def __init__(self):
            self.factor = 3

        @gradsplit.compile(backend="eager", fullgraph=True)
        def scaled(self, x):
            return x * self.factor

        @gradsplit.compile(backend="eager")
        def shifted(self, x, by=1):
            return x + by

    model = Model()
    assert torch.equal(model.scaled(torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(model.shifted(torch.ones(2), by=2), torch.full((2,), 3.0))
    assert torch.equal(Model.shifted(model, torch.ones(2)), torch.full((2,), 2.0))


def test_what_controls_compilation_is_not_compiled_itself():
    inner = gradsplit.compile(scale, backend="eager")

    def controls(x):
        x = x + gradsplit.explain(scale)(x, 2).graph_count
        gradsplit.reset()
        x = gradsplit.run(inner)(x, 2)
        x = gradsplit.compile(lambda y: y + 1, backend="eager")(x)
        return gradsplit.disable(scale)(x, 3)

    compiled = gradsplit.compile(controls, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 15.0))


STATE = {"count": 0}


def test_guards_that_fail_at_once_leave_the_function_plain(caplog):
    """What compiling itself changes is never what it was when it was read."""

    def function(x):
        return x * STATE["count"]

    def counting_backend(module, inputs):
        STATE["count"] += 1
        return module.forward

    compiled = gradsplit.compile(function, backend=counting_backend)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert "runs as plain Python from now on" in caplog.text
    compiled(torch.ones(2))
    assert STATE["count"] == 1
