"""The code samples of torch's "Frequently Asked Questions" about ``torch.compile``, in the three versions of that page,
with this project's names in place of torch's: one test a sample, which checks what the page says of it.

The samples about NumPy and ``torch.func`` have files of their own.
"""

from __future__ import annotations

import re

import pytest
import torch

import gradsplit
from gradsplit import CompileProfiler
from gradsplit.compile_core.interface.testing import CompileCounter


@pytest.fixture(autouse=True)
def nothing_compiled():
    gradsplit.reset()


def toy_example(a, b):
    x = a / (torch.abs(a) + 1)
    print("woo")
    if b.sum() < 0:
        b = b * -1
    return x * b


def test_training_is_supported():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    gradsplit.compile(model)(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "triton"])
def test_the_stages_are_tried_one_after_the_other(backend):
    """The page bisects a crash by backends; here the last one is this project's own."""

    def f(x):
        return (x.sin() * 2).sum()

    x = torch.randn(5, requires_grad=True)
    gradsplit.compile(f, backend=backend)(x).backward()
    assert torch.allclose(x.grad, 2 * x.cos())


def test_compile_times_are_shown():
    gradsplit.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    times = gradsplit.compile_times()
    assert isinstance(times, str) and "capture" in times


def my_model(x, n):
    return x * n


def test_the_recompilation_profiler_as_a_context_manager():
    with CompileProfiler() as prof:
        profiler_model = gradsplit.compile(my_model, backend=prof)
        for n in range(3):
            profiler_model(torch.ones(2), n)
        report = prof.report()
    assert "recompiled 2 times" in report and "not: n == 0" in report


def test_the_recompilation_profiler_on_its_own():
    prof = CompileProfiler()
    profiler_model = gradsplit.compile(my_model, backend=prof)
    profiler_model(torch.ones(2), 2)
    assert "No recompilation detected." in prof.report()


def test_a_frozen_function_compiles_nothing_new(capsys):
    counter = CompileCounter()
    compiled = gradsplit.compile(toy_example, backend=counter)
    compiled(torch.ones(10), torch.ones(10))
    assert counter.frame_count == 3
    frozen_toy_example = gradsplit.run(toy_example)
    a, b = torch.randn(10), torch.randn(10)
    assert torch.allclose(frozen_toy_example(a, b), toy_example(a, b))
    assert torch.allclose(frozen_toy_example(a, -torch.ones(10)), toy_example(a, -torch.ones(10)))
    assert torch.allclose(frozen_toy_example(a[:3], b[:3]), toy_example(a[:3], b[:3]))
    assert counter.frame_count == 3
    assert set(capsys.readouterr().out.split()) == {"woo"}


def test_some_fun():
    def some_fun(x):
        return torch.relu(x) + 1

    x = torch.randn(4)
    assert torch.allclose(gradsplit.compile(some_fun)(x), some_fun(x))


def test_explain_identifies_the_breaks():
    explanation = gradsplit.explain(toy_example)(torch.randn(10), torch.ones(10))
    assert str(explanation).startswith("Graph Count: 3\nGraph Break Count: 2\nOp Count: 5\nBreak Reasons:\n")
    reasons = str(explanation).split("Ops per Graph:")[0]
    assert re.search(r"Break Reason 1:\n    Reason: .*print", reasons)
    assert re.search(r"<FrameSummary file .*test_reference_faq.py, line \d+ in toy_example>", reasons)
    assert "Break Reason 2:" in reasons and "Break Reason 3:" not in reasons


def test_explain_in_the_older_form():
    explanation, out_guards, graphs, ops_per_graph = gradsplit.explain(
        toy_example, torch.randn(10), torch.ones(10)
    )
    assert "3 graphs, with 2 graph break" in explanation
    assert re.search(r'1\. .*print.*\n  File ".*", line \d+, in toy_example\n    print\("woo"\)', explanation)
    assert re.search(r"2\. .*\n  File .*, line \d+, in toy_example.*\n    if b.sum\(\) < 0:", explanation)
    assert len(graphs) == 3 and len(ops_per_graph) == 3 and out_guards


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_fullgraph_raises_at_the_first_break(backend):
    with pytest.raises(gradsplit.Unsupported, match='print\\("woo"\\)'):
        gradsplit.compile(toy_example, fullgraph=True, backend=backend)(torch.randn(10), torch.randn(10))


def test_only_the_graph_that_changed_is_compiled_again(capsys):
    """The page: of three graphs, only the one that a change concerns is compiled again."""
    scale = 2.0

    def f(a, b):
        x = a + 1
        print("woo")
        return x * b * scale

    counter = CompileCounter()
    compiled = gradsplit.compile(f, backend=counter)
    compiled(torch.ones(2), torch.ones(2))
    assert counter.frame_count == 2
    scale = 3.0
    assert torch.equal(compiled(torch.ones(2), torch.ones(2)), torch.full((2,), 6.0))
    assert counter.frame_count == 3


def a_fn(x):
    return ab_fn(aa_fn(x) + 1)


def aa_fn(x):
    return x * 2


def ab_fn(x):
    return x * 3


def test_disable_leaves_a_function_and_what_it_calls_alone():
    counter = CompileCounter()
    disabled = gradsplit.disable(a_fn)

    @gradsplit.compile(backend=counter)
    def f(x):
        return disabled(x + 1) - 1

    assert torch.equal(f(torch.ones(2)), torch.full((2,), 14.0))
    assert (counter.frame_count, counter.op_count) == (2, 2)


def test_disallow_in_graph_runs_an_operator_eagerly():
    counter = CompileCounter()
    gradsplit.disallow_in_graph(torch.sub)
    try:

        @gradsplit.compile(backend=counter)
        def f(x):
            x = torch.add(x, 1)
            x = torch.sub(x, 1)
            return torch.add(x, 1)

        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
        assert (counter.frame_count, counter.op_count) == (2, 2)
    finally:
        gradsplit.allow_in_graph(torch.sub)


def test_graph_break_prevents_inlining():
    counter = CompileCounter()

    def kept_apart(x):
        gradsplit.graph_break()
        return x * 2

    @gradsplit.compile(backend=counter)
    def f(x):
        return kept_apart(x + 1) - 1

    assert torch.equal(f(torch.ones(2)), torch.full((2,), 3.0))
    assert counter.frame_count == 3
