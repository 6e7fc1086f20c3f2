"""``explain_ddp``: what it says of a module, and that it leaves the module as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradsplit
from gradsplit.compile_core.errors import CompileError
from gradsplit.distributed import DDPOptions, compile_ddp, explain_ddp, inspect_ddp
from gradsplit.distributed.explaining.record_timeline import record_timeline
from gradsplit.distributed.reducer.parked_reducer import is_parked
from gradsplit.distributed.reducer.stock_buckets import stock_buckets
from tests.multi_process.ddp_harness import DEVICE, Net, case, data, loss_of, pair, stock_ddp


@case()
def plan_beside_stock_ddp() -> None:
    _, compiled = pair()
    explanation = explain_ddp(compiled)(data(0))
    assert explanation.plan == inspect_ddp(compiled).plan
    names = {name for name, _ in compiled.module.named_parameters()}
    assert {parameter.name for parameter in explanation.stock_plan.parameters} == names
    assert len(explanation.stock_plan.buckets) > 1
    assert {name for segment in explanation.segments for name in segment.gradients} == names
    assert set(explanation.ready_ms) == names and min(explanation.ready_ms.values()) > 0
    assert len(explanation.reasons) == len(explanation.plan.buckets)
    predicted = [
        interval.bytes for interval in explanation.predicted.intervals if interval.kind == "all_reduce"
    ]
    moved = [interval.bytes for interval in explanation.measured.intervals if interval.kind == "all_reduce"]
    assert moved == predicted == [bucket.bytes for bucket in explanation.plan.buckets]
    with record_timeline(compiled), pytest.raises(CompileError, match="being recorded already"):
        explain_ddp(compiled)(data(0))
    text = str(explanation)
    for expected in ("Buckets, beside stock DDP's", "third.weight", "backward_0", "exposed", "start-ups"):
        assert expected in text, text


@case()
def explained_module_is_left_as_it_was() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Net(nn.BatchNorm1d(32)), nn.Dropout(0.5))

    _, compiled = pair(make)
    compiled(data(0)).sum().backward()
    held = [(p, p.grad, p.grad.clone()) for p in compiled.parameters()]
    buffers = copy.deepcopy(dict(compiled.named_buffers()))
    torch.manual_seed(3)
    expected = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    explain_ddp(compiled)(data(1))
    assert torch.equal(torch.rand(4, device=DEVICE), expected)
    assert all(p.grad is gradient and torch.equal(gradient, value) for p, gradient, value in held)
    assert all(torch.equal(value, buffers[name]) for name, value in compiled.named_buffers())


class _Counting(Net):
    """Puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return super().forward(x)


@case()
def buffers_that_are_replaced_are_left_as_they_were() -> None:
    """Behind a call under ``no_sync()`` a rank goes on with its own buffers."""
    _, compiled = pair(_Counting, backend="aot_eager")
    loss_of(compiled(data(0))).backward()
    with compiled.no_sync():
        loss_of(compiled(data(0))).backward()
    count = compiled.module.count
    explain_ddp(compiled)(data(1))
    assert compiled.module.count is count and count == 2
    assert not compiled.require_forward_param_sync


@case()
def module_that_is_not_compiled() -> None:
    ddp = stock_ddp()
    explanation = explain_ddp(ddp)(data(0))
    assert explanation.plan is not None
    assert all(parameter.grad is None for parameter in ddp.parameters())


@case()
def optimizer_that_backwards_would_step() -> None:
    ddp = stock_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in ddp.parameters()]
    with pytest.raises(CompileError, match="would step the optimizer"):
        explain_ddp(compile_ddp(ddp, DDPOptions(step_in_backward=optimizer)))(data(0))
    assert all(
        torch.equal(parameter, value) for parameter, value in zip(ddp.parameters(), before, strict=True)
    )


@case()
def module_of_the_reducer() -> None:
    _, compiled = pair(find_unused_parameters=True)
    explanation = explain_ddp(compiled)(data(0))
    assert explanation.plan is None
    assert len(explanation.stock_plan.buckets) > 1 and explanation.pieces == (
        len(explanation.stock_plan.buckets),
    )
    assert "find_unused_parameters=True" in str(explanation)


@case()
def communication_hook_before_and_after_the_first_step() -> None:
    for steps in (0, 1):
        _, compiled = pair(backend="aot_eager")
        for step in range(steps):
            loss_of(compiled(data(step))).backward()
        compiled.register_comm_hook(None, default_hooks.allreduce_hook)
        explanation = explain_ddp(compiled)(data(0))
        assert "a communication hook is registered" in str(explanation) and explanation.pieces == (3,)
        with pytest.raises(CompileError, match=r"nothing to record.*hook"), record_timeline(compiled):
            pass


@case()
def module_that_ran_plainly_before() -> None:
    """Its reducer has rebuilt its buckets, is let go, and must not be made again to be explained."""
    ddp = stock_ddp()
    for step in range(2):
        loss_of(ddp(data(step))).backward()
    rebuilt = [len(bucket) for bucket in stock_buckets(ddp, [])]
    explanation = explain_ddp(ddp)(data(0))
    assert [len(bucket.parameters) for bucket in explanation.stock_plan.buckets] == rebuilt
    assert is_parked(ddp)


class _Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.nn.functional.gelu(self.norm(self.first(x))))
        gradsplit.graph_break()
        return self.third(torch.tanh(x))


@case()
def segments_of_several_graphs() -> None:
    _, compiled = pair(_Broken)
    explanation = explain_ddp(compiled)(data(0))
    graph_of = {name: segment.name[:7] for segment in explanation.segments for name in segment.gradients}
    assert (graph_of["third.weight"], graph_of["second.weight"]) == ("graph 1", "graph 0")
