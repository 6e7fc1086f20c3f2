"""Marks on functions: our own, and those that programs written for ``torch.compile`` carry."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch._dynamo

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.errors import Unsupported


def compile_eager(function, **options):
    return CompiledFunction(function, lambda graph, inputs: graph.module, **options)


def graph_targets(compiled):
    nodes = compiled.entries[0].captured.graph.module.graph.nodes
    return [node.target for node in nodes if node.op in ("call_function", "call_method")]


@pytest.mark.parametrize(
    "query",
    [
        gradsplit.is_compiling,
        torch.compiler.is_compiling,
        torch._dynamo.is_compiling,
        torch._dynamo.external_utils.is_compiling,
        torch.compiler.is_dynamo_compiling,
    ],
)
def test_compiled_code_knows_that_it_is_compiled(query):
    def choose(x):
        return x + 1 if query() else x - 1

    compiled = compile_eager(choose, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(choose(torch.ones(2)), torch.zeros(2))


@pytest.mark.parametrize("ask", [gradsplit.graph_break, torch._dynamo.graph_break])
def test_a_graph_break_that_is_asked_for(ask):
    def two_parts(x):
        y = x + 1
        ask("half way")
        return y * 2

    compiled = compile_eager(two_parts)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    (reason,) = compiled.break_reasons
    assert reason.reason_id == "graph-break"
    assert "half way" in reason.explanation
    with pytest.raises(Unsupported, match=r"asks for a graph break(.|\n)*test_directives.py(.|\n)*half way"):
        compile_eager(two_parts, fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize("disable", [gradsplit.disable, torch.compiler.disable])
def test_a_disabled_function_is_called_plainly(disable):
    seen = []

    @disable
    def noisy(x):
        seen.append(gradsplit.is_compiling())
        return x + 1

    compiled = compile_eager(lambda x: noisy(x * 2) * 3)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert seen == [False, False]
    assert compiled.break_reasons[0].reason_id == "disabled"


@pytest.mark.parametrize("disable", [gradsplit.disable, torch.compiler.disable])
def test_the_reason_of_a_disabled_function_is_told(disable):
    @disable(reason="it reads a file")
    def noisy(x):
        return x + 1

    with pytest.raises(Unsupported, match="it reads a file"):
        compile_eager(lambda x: noisy(x), fullgraph=True)(torch.ones(2))


def double(x):
    return x * 2


@pytest.mark.parametrize(
    "allow", [gradsplit.allow_in_graph, torch.compiler.allow_in_graph, torch._dynamo.nonstrict_trace]
)
def test_an_allowed_function_is_one_node(allow):
    @allow
    def opaque(x):
        return double(x) + 1

    compiled = compile_eager(lambda x: opaque(x) * 3, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert graph_targets(compiled)[0] is opaque

    @functools.wraps(opaque)
    def around(x):
        return opaque(x + 1)

    compiled = compile_eager(lambda x: around(x), fullgraph=True)
    compiled(torch.ones(2))
    assert graph_targets(compiled)[1] is opaque


def test_a_function_is_allowed_inside_of_compiled_code():
    def allows(x):
        scale = 3

        def inner(y):
            return torch.add(y, scale)

        return gradsplit.allow_in_graph(inner)(x)

    compiled = compile_eager(allows, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert [target.__name__ for target in graph_targets(compiled)] == ["inner"]


def test_results_of_allowed_functions_may_be_nested():
    @gradsplit.allow_in_graph
    def several(x, n):
        return x + n, (x * 2, [x - 1, None]), {"size": x.shape[0], "same": x, 3: torch.ones(2)}

    def uses(x):
        first, (second, (third, nothing)), named = several(x, 3)
        assert nothing is None and list(named) == ["size", "same", 3]
        return first + second * third * named["size"] + named["same"] + named[3], named

    compiled = compile_eager(uses, fullgraph=True)
    x = torch.randn(2)
    (result, named), (expected, plainly) = compiled(x), uses(x)
    assert torch.equal(result, expected)
    assert named.keys() == plainly.keys() and named["same"] is x and named["size"] == 2


def test_allowed_functions_that_bear_another_functions_name():
    summed = gradsplit.allow_in_graph(
        torch.vmap(torch.sum)
    )  # its __name__ and __module__ are those of torch.sum
    nameless = gradsplit.allow_in_graph(lambda x: x * 3)
    partial = gradsplit.allow_in_graph(functools.partial(torch.add, alpha=2))

    def uses(x):
        return partial(nameless(x), x).sum(1) + summed(x)

    compiled = compile_eager(uses, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2,), 18.0))


@pytest.mark.parametrize("disallow", [gradsplit.disallow_in_graph, torch._dynamo.disallow_in_graph])
def test_a_disallowed_operation_ends_the_graph(disallow):
    allow = (
        gradsplit.allow_in_graph if disallow is gradsplit.disallow_in_graph else torch.compiler.allow_in_graph
    )

    def three(x):
        x = torch.add(x, 1)
        x = torch.sub(x, 1)
        return torch.add(x, 1)

    disallow(torch.sub)
    try:
        compiled = compile_eager(three)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        assert graph_targets(compiled) == [torch.add]
        assert graph_targets(compiled.continuations[0]) == [torch.add]
        assert compiled.break_reasons[0].reason_id == "disallowed"
    finally:
        allow(torch.sub)
    compiled = compile_eager(three, fullgraph=True)
    compiled(torch.ones(2))
    assert graph_targets(compiled) == [torch.add, torch.sub, torch.add]


def test_marks_take_lists_and_refuse_what_cannot_be_called():
    assert gradsplit.allow_in_graph([double]) == [double]
    assert gradsplit.disallow_in_graph((double,)) == [double]
    assert gradsplit.allow_in_graph(double) is double
    with pytest.raises(TypeError, match="not callable"):
        gradsplit.allow_in_graph(3)


@pytest.mark.parametrize("mark", [gradsplit.assume_constant_result, torch.compiler.assume_constant_result])
def test_a_constant_result_is_asked_for_once(mark):
    calls = []

    @mark
    def settings(name):
        calls.append(name)
        return {"scale": 2.0, "table": torch.arange(2.0)}[name]

    def uses(x):
        return x * settings("scale") + settings("table")

    compiled = compile_eager(uses, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.tensor([2.0, 3.0]))
    assert calls == ["scale", "table"]


def test_a_constant_method_gets_its_object():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.width = 4

        @gradsplit.assume_constant_result
        def scale(self):
            return math.sqrt(self.width)

        def forward(self, x):
            return x * self.scale()

    compiled = compile_eager(Model(), fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_what_torch_compiled_is_captured_as_what_it_was():
    inner = torch.compile(double, backend="eager")
    layer = torch.compile(torch.nn.Linear(2, 2), backend="eager")

    def uses(x):
        return layer(inner(x))

    compiled = compile_eager(uses, fullgraph=True)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), layer._orig_mod(x * 2))
    assert len(graph_targets(compiled)) == 2


def test_a_module_that_torch_disabled_is_called_plainly():
    layer = torch.compiler.disable(torch.nn.Linear(2, 2))
    compiled = compile_eager(lambda x: layer(x) + 1)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), layer._orig_mod(x) + 1)
    assert compiled.break_reasons


def test_nested_regions():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.linear(x).relu()

    region = torch.compiler.nested_compile_region(lambda x, factor: (x * factor).sin())
    layers = torch.nn.ModuleList([Layer(), Layer()])

    def run(x):
        for layer in layers:
            x = layer(region(x, 2.0))
        return x

    x = torch.randn(2, 4)
    assert torch.equal(compile_eager(run, fullgraph=True)(x), run(x))
