"""What a backend gets: names that a reader knows, example values, the user's lines, errors with notes."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import gradsplit
from gradsplit.compile_core.backends import registry
from gradsplit.compile_core.interface.testing import CompileCounterWithBackend


def graph_of(function, *args):
    counter = CompileCounterWithBackend("eager")
    gradsplit.compile(function, backend=counter, fullgraph=True)(*args)
    (graph,) = counter.graphs
    return graph


def named(graph):
    return [node.name for node in graph.graph.nodes]


def test_operations_are_named_after_the_variables_that_hold_them():
    def f(a, other):
        total = a + other
        left, right = total.chunk(2)
        scaled = left * 2
        again = scaled
        scaled = right * 3
        return again + scaled

    names = named(graph_of(f, torch.ones(4), torch.ones(4)))
    assert names[:2] == ["l_a_", "l_other_"]
    assert {"total", "left", "right", "scaled", "scaled_1"} <= set(names)
    assert "again" not in names


def test_variables_of_inlined_functions_count_too():
    def inner(x):
        shifted = x + 1
        return shifted * 2

    assert "shifted" in named(graph_of(lambda a: inner(a), torch.ones(2)))


def test_a_variable_named_self_or_torch_does_not_disturb_the_graph():
    def f(x):
        self = x + 1
        torch_ = self * 2
        forward = torch_ - 1
        return shadows_torch(forward)

    def shadows_torch(x):
        torch = x.abs()
        return torch.sin()

    x = torch.randn(3)
    assert torch.equal(graph_of(f, x)(x)[0], f(x))


def test_placeholders_tell_where_their_tensors_are():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("offset", torch.ones(2))

        def forward(self, inputs, x_0):
            return self.layer(inputs["x"][0]) + self.offset + x_0

    graph = graph_of(Model(), {"x": [torch.ones(1, 2)]}, torch.ones(1, 2))
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["l_inputs_x_0_", "p_layer_weight", "p_layer_bias", "b_offset", "l_x_0_"]


def test_two_paths_of_one_text_get_two_names():
    def f(x, x_0):
        return x[0] + x_0

    graph = graph_of(f, [torch.ones(2)], torch.full((2,), 3.0))
    assert named(graph)[:2] == ["l_x_0_", "l_x_0_1"]
    assert torch.equal(graph(torch.ones(2), torch.full((2,), 3.0))[0], torch.full((2,), 4.0))


def test_nodes_carry_examples_and_the_users_lines():
    def f(x):
        return inner(x) + 1

    def inner(x):
        return x.reshape(2, 3)  # the innermost line

    graph = graph_of(f, torch.ones(6))
    for node in graph.graph.nodes:
        if node.op != "output":
            assert isinstance(node.meta["example_value"], FakeTensor)
    (reshape,) = (node for node in graph.graph.nodes if node.target == "reshape")
    assert tuple(reshape.meta["example_value"].shape) == (2, 3)
    assert reshape.stack_trace == reshape.meta["stack_trace"]
    lines = reshape.stack_trace.strip().splitlines()
    assert lines[1].strip() == "return inner(x) + 1"
    assert lines[-1].strip() == "return x.reshape(2, 3)  # the innermost line"
    assert "test_backend_graphs.py" in lines[0]


def test_the_graph_prints_as_a_table(capsys):
    graph_of(lambda x: x + 1, torch.ones(2)).graph.print_tabular()
    header, _, placeholder, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["opcode", "name", "target", "args", "kwargs"]
    assert placeholder.split() == ["placeholder", "l_x_", "L_x_", "()", "{}"]


def test_what_a_backend_returns_is_what_runs():
    def backend(gm, example_inputs):
        assert isinstance(gm, torch.fx.GraphModule) and isinstance(example_inputs, list)
        return lambda *inputs: [result * 10 for result in gm(*inputs)]

    assert torch.equal(
        gradsplit.compile(lambda x: x + 1, backend=backend)(torch.ones(2)), torch.full((2,), 20.0)
    )


def test_a_users_backend_gets_mode_and_options():
    seen = []

    def backend(gm, example_inputs, **given):
        seen.append(given)
        return gm.forward

    for arguments in ({}, {"mode": "default"}, {"mode": "fast"}, {"options": {"level": 3}}):
        gradsplit.reset()  # the first two mean the same
        gradsplit.compile(lambda x: x + 1, backend=backend, **arguments)(torch.ones(1))
    assert seen == [{}, {}, {"mode": "fast"}, {"options": {"level": 3}}]
    with pytest.raises(ValueError, match="unknown option 'level'"):
        gradsplit.compile(lambda x: x + 1, backend="eager", options={"level": 3})


def test_tags_of_backends():
    assert "triton" in gradsplit.list_backends()
    assert not {"eager", "aot_eager"} & set(gradsplit.list_backends())
    assert {"eager", "aot_eager", "triton"} <= set(gradsplit.list_backends(None))
    assert {"eager", "aot_eager", "triton"} <= set(gradsplit.list_backends(exclude_tags=()))

    @gradsplit.register_backend(name="tagged_for_test", tags=["experimental"])
    def tagged(gm, example_inputs):
        return gm.forward

    @gradsplit.register_backend
    def named_for_test(gm, example_inputs):
        return gm.forward

    assert "tagged_for_test" not in gradsplit.list_backends()
    assert "tagged_for_test" in gradsplit.list_backends(exclude_tags=["debug"])
    assert "named_for_test" in gradsplit.list_backends()
    assert torch.equal(
        gradsplit.compile(lambda x: x + 1, backend="tagged_for_test")(torch.ones(1)), torch.full((1,), 2.0)
    )


def test_an_installed_backend_is_found_by_its_entry_point(monkeypatch):
    point = EntryPoint(
        "installed_for_test", "tests.capture.test_backend_graphs:installed", "gradsplit.backends"
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    assert "installed_for_test" in gradsplit.list_backends()
    compiled = gradsplit.compile(lambda x: x + 1, backend="installed_for_test")
    assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))


def installed(gm, example_inputs):
    return gm.forward


def test_unknown_backends_are_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"unknown backend 'tritom'; did you mean 'triton'\?.*aot_eager"):
        gradsplit.compile(lambda x: x, backend="tritom")


def test_graphs_are_logged_at_info(caplog):
    with gradsplit.config.patch(log_level=logging.INFO):
        gradsplit.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
    assert "mul: float32[2] cpu = operator.mul(l_x_, 3)" in caplog.text


def test_names_of_torchs_backends_for_finding_faults():
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Dropout()),
        torch.ones(2, 4),
    )
    for backend in ("aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition"):
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(gradsplit.compile(model, backend=backend, fullgraph=True)(x), expected)
