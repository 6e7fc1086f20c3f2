"""``explain``, ``CompileProfiler`` and ``compile_times``: what a compilation tells of itself."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import gradsplit
from gradsplit.compile_core.observe.stage_times import timed


def toy_example(a, b):
    x = a / (torch.abs(a) + 1)
    print("woo")
    if b.sum() < 0:
        b = b * -1
    return x * b


def test_explain_counts_graphs_breaks_and_operations(capsys):
    explanation = gradsplit.explain(toy_example)(torch.ones(10), torch.ones(10))
    assert capsys.readouterr().out == "woo\n"
    assert (explanation.graph_count, explanation.graph_break_count, explanation.op_count) == (3, 2, 5)
    assert [len(ops) for ops in explanation.ops_per_graph] == [3, 1, 1]
    assert explanation.ops_per_graph[0][0] is torch.abs
    assert len(explanation.graphs) == 3
    lines = [reason.user_stack[-1] for reason in explanation.break_reasons]
    assert [line.line for line in lines] == ['print("woo")', "if b.sum() < 0:"]
    assert lines[0].name == "toy_example" and lines[0].filename == __file__
    assert "data-dependent-branch" in explanation.break_reasons[1].reason


def test_a_call_without_any_graph_says_why(capsys):
    def only_prints(x):
        print("here")
        return x

    explanation = gradsplit.explain(only_prints)(torch.ones(2))
    assert explanation.graph_count == 0
    assert [reason.user_stack[-1].line for reason in explanation.break_reasons] == ['print("here")']


def test_explain_prints_as_a_report():
    text = str(gradsplit.explain(toy_example)(torch.ones(10), torch.ones(10)))
    assert text.startswith(
        "Graph Count: 3\nGraph Break Count: 2\nOp Count: 5\nBreak Reasons:\n  Break Reason 1:\n"
    )
    assert re.search(
        r"User Stack:\n      <FrameSummary file .*test_explain.py, line \d+ in toy_example>", text
    )
    assert "Ops per Graph:\n  Ops 1:\n    <built-in method abs" in text
    assert "Out Guards:\n  Guard 1:\n    Name: " in text
    assert re.search(
        r"Name: 'a'\n    Source: local\n    Guard Types: \['tensor'\]\n    Code List: .*float32\[10\]", text
    )
    assert re.search(r"Compile Times: (.|\n)*capture +\d", text)


def test_explain_counts_operators_without_a_lowering_and_what_was_not_fused():
    def function(x, weight):
        hidden = torch.cumsum(x @ weight, 0).sin()
        return (hidden / hidden.sum(0)).cumsum(1) + (hidden * 2).sum(1, keepdim=True)

    explanation = gradsplit.explain(function)(torch.randn(64, 8), torch.randn(8, 33, requires_grad=True))
    assert explanation.fallbacks["aten.cumsum.default"] == 4  # two of them in the backward
    assert explanation.unfused and all("bytes" in pair for pair in explanation.unfused)
    text = str(explanation)
    assert "Operators without a Lowering:\n  aten.cumsum.default: 4\n" in text
    assert f"Not Fused:\n  {explanation.unfused[0]}\n" in text


def test_explain_of_a_break_in_a_called_function_shows_both_lines():
    def inner(x):
        gradsplit.graph_break()
        return x + 1

    def outer(x):
        return inner(x * 2)

    (reason,) = gradsplit.explain(outer)(torch.ones(2)).break_reasons
    assert [line.name for line in reason.user_stack] == ["outer", "inner"]


def test_the_older_form_of_explain():
    explanation, out_guards, graphs, ops_per_graph = gradsplit.explain(
        toy_example, torch.ones(10), torch.ones(10)
    )
    assert "3 graphs, with 2 graph breaks and 5 ops" in explanation
    assert 'print("woo")' in explanation
    assert len(graphs) == len(ops_per_graph) == 3 and out_guards


def test_explain_uses_and_changes_no_entries():
    compiled = gradsplit.compile(toy_example, backend="eager")
    explanation = gradsplit.explain(compiled)(torch.ones(10), torch.ones(10))
    assert explanation.graph_count == 3
    assert not compiled.entries


def test_explain_of_a_module():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    for module in (model, gradsplit.compile(model)):
        explanation = gradsplit.explain(module)(torch.ones(1, 2))
        assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)


def test_the_profiler_reports_breaks_and_the_guards_that_fail(capsys):
    def repeats(x, n):
        print(n)
        return x * n

    with gradsplit.CompileProfiler() as profiler:
        compiled = gradsplit.compile(repeats, backend=profiler, dynamic=False)
        for n in range(4):
            compiled(torch.ones(2), n)
    assert profiler.frame_count == 4 and profiler.op_count == 4
    report = profiler.report()
    assert "Graph Breaks\n------------\n" in report and "print(n)" in report
    assert re.search(
        r"'repeats' \(.*test_explain.py:\d+\)\n  recompiled 3 times:\n    not: n == 0\n    not: n == 1\n",
        report,
    )
    assert "Set gradsplit.config.cache_size_limit to 4" in report
    (failures, *_) = profiler.get_metrics()["guard_failures"].values()
    assert len(failures) == 3
    capsys.readouterr()


def test_a_profile_without_events():
    profiler = gradsplit.CompileProfiler()
    gradsplit.compile(lambda x: x + 1, backend=profiler)(torch.ones(2))
    assert "No graph breaks detected." in profiler.report()
    assert "No recompilation detected." in profiler.report()


def test_compile_times_name_the_stages():
    gradsplit.compile(lambda x: (x.sin() * 2).sum())(torch.ones(2, requires_grad=True))
    stages, times = gradsplit.compile_times(repr="csv", aggregate=True)
    wanted = {"capture", "guards", "trace_joint", "partition", "lower", "fuse", "generate", "build", "link"}
    assert wanted <= set(stages)
    assert all(float(value) >= 0 for value in times)
    assert re.search(r"trace_joint +\d+\.\d{4}", gradsplit.compile_times())
    with pytest.raises(ValueError, match="repr='json'"):
        gradsplit.compile_times("json")


def test_a_stage_that_raises_is_timed_too():
    with pytest.raises(KeyError), timed("stage of this test"):
        raise KeyError
    assert "stage of this test" in gradsplit.compile_times()


def test_a_hit_is_not_timed():
    compiled = gradsplit.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    before = gradsplit.compile_times("csv")
    compiled(torch.ones(2))
    assert gradsplit.compile_times("csv") == before


def test_a_ddp_module_is_explained_as_what_reduces_its_gradients() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        for module in (ddp, gradsplit.compile(ddp)):
            assert isinstance(
                gradsplit.explain(module)(torch.ones(4, 3)), gradsplit.distributed.DDPExplanation
            )
        assert isinstance(gradsplit.explain(ddp, torch.ones(4, 3)), gradsplit.distributed.DDPExplanation)
    finally:
        dist.destroy_process_group()
