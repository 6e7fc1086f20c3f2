"""The verifiers of joint graphs, partitions and schedules find what breaks each rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.verify_graphs import verify_joint, verify_partition, verify_schedule


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(x @ w),)


@pytest.fixture
def joint() -> JointGraph:
    mode = FakeTensorMode()
    examples = [mode.from_tensor(torch.randn(3, 3, requires_grad=True)) for _ in range(2)]
    return trace_joint(torch.fx.symbolic_trace(Product()), examples, {})


@pytest.fixture
def schedule(joint: JointGraph) -> Schedule:
    backward = partition(joint).backward
    assert backward is not None
    return whole_schedule("backward", backward)


def test_what_the_stages_make_is_sound(joint: JointGraph, schedule: Schedule) -> None:
    verify_joint(joint)
    verify_partition(joint, partition(joint))
    verify_schedule(schedule)


def test_joint_graphs(joint: JointGraph) -> None:
    with pytest.raises(InternalError, match=r"3 results, not 2"):
        verify_joint(replace(joint, num_outputs=0))
    with pytest.raises(InternalError, match="inputs are"):
        verify_joint(replace(joint, primals=joint.primals[:1]))
    signature = replace(joint.signature, gradient_inputs=(0, 5))
    with pytest.raises(InternalError, match="gradient inputs are among the 2 primals"):
        verify_joint(replace(joint, signature=signature))
    del next(iter(joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))).meta[
        "val"
    ]
    with pytest.raises(InternalError, match="every node carries its fake value"):
        verify_joint(joint)


def test_operators_that_change_their_arguments(joint: JointGraph) -> None:
    (node,) = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    node.target = torch.ops.aten.tanh_.default
    with pytest.raises(InternalError, match="changes its arguments"):
        verify_joint(joint)


def test_partitions(joint: JointGraph) -> None:
    graph = partition(joint)
    with pytest.raises(InternalError, match="backward: inputs are"):
        verify_partition(joint, replace(graph, saved=graph.saved[::-1]))


def test_schedules(schedule: Schedule) -> None:
    (compute,) = schedule.computes
    with pytest.raises(InternalError, match="a region reads what is known before it"):
        verify_schedule(replace(schedule, inputs=schedule.inputs[1:]))
    with pytest.raises(InternalError, match="a value is named once"):
        verify_schedule(replace(schedule, computes=(compute, compute)))
    with pytest.raises(InternalError, match="what is stored is a result"):
        verify_schedule(replace(schedule, computes=(replace(compute, destinations={"nothing": "p"}),)))
    with pytest.raises(InternalError, match="a result is an input or computed"):
        verify_schedule(replace(schedule, outputs=("nothing",)))
    twice = dict.fromkeys(compute.outputs, "p")
    assert len(twice) > 1
    with pytest.raises(InternalError, match="a destination is written once"):
        verify_schedule(replace(schedule, computes=(replace(compute, destinations=twice),)))
