# ruff: noqa: RET504 - what is written here is what is tested
"""Graph breaks: the pieces together do what the plain function does."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import Unsupported
from tests.capture.test_language import assert_same

LOG = []


def compile_counting(function):
    graphs = []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.module

    return CompiledFunction(function, compile_graph), graphs


def opaque(x):
    """Something no rule covers."""
    LOG.append(float(x.detach().sum()))
    return x * 2


def prints(x):
    y = x + 1
    print("inside", y.shape[0])
    return y * 2


def branches(x):
    y = x * 2
    if y.sum() > 0:
        z = y + 1
    else:
        z = y - 1
    return z * 3


def uses_item(x):
    n = x.sum().item()
    return x * n


def break_in_expression(x):
    return (x + 1) * float((x * 2).detach().sum()) + opaque(x)[0]


def break_in_loop(x):
    for i in range(3):
        x = x + i
        print("step", i)
    return x


def break_in_module_list(x):
    for layer in (torch.relu, torch.sigmoid):
        x = layer(x)
        if x.sum() < 0:
            x = -x
    return x


def keyword_call(x):
    print("a", x.shape[0], sep="-", end="!\n")
    args, named = ("b",), {"end": "?\n"}
    print(*args, **named)
    return x + 1


def while_on_data(x):
    while x.sum() < 10:
        x = x + 1
    return x


def store_before_break(x, items):
    items.append(x + 1)
    print(len(items))
    items.append(x + 2)
    return items


def short_circuit(x):
    flag = x.sum() > 0 and x.shape[0] == 2
    return x * 2 if flag else x


def format_tensor(x):
    text = f"{x.sum():.2f}|{x.shape}"
    return text, x + 1


def break_in_with(x):
    with torch.no_grad():
        y = x * 2
        print("no grad")
        y = y + 1
    return y


FUNCTIONS = [
    prints,
    branches,
    uses_item,
    break_in_expression,
    break_in_loop,
    break_in_module_list,
    keyword_call,
    while_on_data,
    short_circuit,
    format_tensor,
    break_in_with,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_same_as_plain(function, capsys):
    compiled, _ = compile_counting(function)
    for seed in (0, 1, 2, 3):
        torch.manual_seed(seed)
        x = torch.randn(2, requires_grad=True)
        result = compiled(x.clone())
        printed = capsys.readouterr().out
        expected = function(x.clone())
        assert capsys.readouterr().out == printed
        assert_same(result, expected)
    assert compiled.break_reasons


def test_both_sides_of_a_print_are_graphs(capsys):
    compiled, graphs = compile_counting(prints)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert capsys.readouterr().out == "inside 2\ninside 2\n"
    assert [len(graph.module.graph.nodes) for graph in graphs] == [3, 3]


def test_branch_compiles_both_sides_once():
    compiled, graphs = compile_counting(branches)
    for sign in (1, -1, 1, -1):
        x = torch.full((2,), float(sign))
        assert torch.equal(compiled(x), branches(x))
    assert len(graphs) == 3


def test_mutation_before_a_break(capsys):
    compiled, _ = compile_counting(store_before_break)
    one, other = [], []
    x = torch.zeros(1)
    assert compiled(x, one) is one
    store_before_break(x, other)
    assert_same(one, other)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        x = self.linear(x)
        print("inner")
        return torch.relu(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Inner()
        self.second = Inner()

    def forward(self, x):
        return self.second(self.first(x + 1) * 2) - 1


def test_callees_are_compiled_too(capsys):
    torch.manual_seed(0)
    model = Outer()
    compiled, graphs = compile_counting(model)
    x = torch.randn(3, 2, requires_grad=True)
    result = compiled(x)
    assert torch.equal(result, model(x))
    result.sum().backward()
    # x + 1; linear and relu of Inner, shared by both inner modules; * 2; - 1
    assert len(graphs) == 5
    assert len(compiled.callees) == 1 and len(compiled.callees[0].entries) == 1


def test_fullgraph_raises_with_the_line():
    compiled = CompiledFunction(branches, lambda graph, inputs: graph.module, fullgraph=True)
    with pytest.raises(Unsupported) as caught:
        compiled(torch.ones(2))
    assert caught.value.reason_id == "data-dependent-branch"
    assert caught.value.location is not None and "y.sum() > 0" in caught.value.location.text


@torch.library.custom_op("gradsplit_tests::strict_when_fake", mutates_args=())
def strict_when_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@strict_when_fake.register_fake
def _strict(x):
    raise ValueError("not of this shape")


def test_what_raises_in_the_capture_only_is_a_recorded_fallback(caplog):
    def function(x):
        return strict_when_fake(x) * 2

    x = torch.ones(3)
    compiled, graphs = compile_counting(function)
    for _ in range(2 * gradsplit.config.cache_size_limit):
        assert torch.equal(compiled(x), function(x))
    assert not graphs
    # Some such calls are captured in vain, and then none.
    reasons = [reason.reason_id for reason in compiled.break_reasons]
    assert reasons == ["exception-in-capture"] * gradsplit.config.cache_size_limit
    assert "not of this shape" in caplog.text and "is not captured in full" in caplog.text
    explained = gradsplit.explain(function)(x).break_reasons
    assert len(explained) == 1 and "ValueError: not of this shape" in explained[0].reason
    with pytest.raises(Unsupported, match="not of this shape"):
        gradsplit.compile(function, backend="eager", fullgraph=True)(x)


def test_an_exception_that_the_program_handles_is_a_recorded_fallback():
    def function(x):
        try:
            return x.view(-1) * 2
        except RuntimeError:
            return x * 3

    compiled, _ = compile_counting(function)
    x = torch.ones(3, 2)
    for argument in (x.T, x):
        assert torch.equal(compiled(argument), function(argument))
    assert [reason.reason_id for reason in compiled.break_reasons] == ["exception-in-capture"]
    with pytest.raises(Unsupported, match="view"):
        gradsplit.compile(function, backend="eager", fullgraph=True)(x.T)


def test_a_reason_is_logged_once(caplog, capsys):
    def talks(x):
        print("talk")
        return x

    with caplog.at_level(logging.WARNING, logger="gradsplit.compile_core.capture"):
        for size in (1, 2, 3):
            CompiledFunction(talks, lambda graph, inputs: graph.module)(torch.ones(size))
    assert len([record for record in caplog.records if "print" in record.getMessage()]) == 1


def test_break_inside_a_range_of_the_profiler():
    """The range goes on in the plain part, under its name."""

    def ranges(x):
        with torch.profiler.record_function("some range"):
            y = x + 1
            y = opaque(y)
        return y - 1

    compiled, graphs = compile_counting(ranges)
    for _ in range(2):
        with torch.profiler.profile(acc_events=True) as profiler:
            assert torch.equal(compiled(torch.ones(2)), ranges(torch.ones(2)))
    assert len(graphs) > 1
    assert sum(event.key == "some range" for event in profiler.key_averages()) == 1


def strings_that_decide(x, mode):
    print("before", x.shape[0])
    scales = {"train": 1, "validate": 2, "test": 3}
    x = x * scales[mode] + (mode == "train") + 2 * (mode != "test") + 4 * (mode in ("test", "validate"))
    if not mode:
        return x - 1
    print("between", mode)
    return x + 1 if mode == "validate" else [x, f"in {mode}", mode.startswith("t")]


def objects_that_decide(x, name):
    return x + 1 if name == b"train" else x - 1


def test_strings_behind_a_break_decide_as_in_python():
    """One that differs between calls is passed on without being known."""
    compiled, _ = compile_counting(strings_that_decide)
    x = torch.ones(3)
    for mode in ("train", "validate", "test", "train", "test", "validate") * 2:
        assert_same(strings_that_decide(x, mode), compiled(x, mode))


def test_objects_without_rules_compare_as_in_python():
    compiled, _ = compile_counting(objects_that_decide)
    x = torch.ones(3)
    for name in (memoryview(b"test"), memoryview(b"train"), bytearray(b"train"), bytearray(b"test")):
        assert_same(objects_that_decide(x, name), compiled(x, name))
