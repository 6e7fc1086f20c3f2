"""Shows how the gradients of a DDP module are reduced: which buckets and why, and how well the link is hidden."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing.bucket import BucketPlan, pack_bucket
from gradsplit.bucketing.simulate import simulate
from gradsplit.bucketing.timeline import Timeline
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.interface.api import compile
from gradsplit.compile_core.torch_facts.process_groups import find_tensors
from gradsplit.distributed.compile_ddp import CompiledDDP, inspect_ddp
from gradsplit.distributed.ddp_module import process_group
from gradsplit.distributed.explaining.ddp_explanation import DDPExplanation, ExplainedSegment
from gradsplit.distributed.explaining.record_timeline import (
    TimelineRecorder,
    labelled_backwards,
    record_timeline,
)
from gradsplit.distributed.planning.ddp_planner import describe
from gradsplit.distributed.reducer.stock_buckets import stock_buckets
from gradsplit.distributed.reducer.wrapped_parameters import reduced_parameters

# In the first steps programs are compiled and costs are measured; at most so many, then the plan is settled.
_SETTLING_STEPS = 12
# A plan begins with transfers that set connections up.
_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3


def explain_ddp(ddp: Any) -> Callable[..., DDPExplanation]:
    """Explains how gradients are reduced when the module is called with some arguments.

    All ranks must do this together: some training steps are run, whose loss is the sum of all floating-point results.
    Afterwards gradients, buffers and torch's random state are what they were before.

    Args:
        ddp: a compiled DDP module; or one that is not compiled, which is explained as ``compile`` with its defaults
            would have it.

    Returns:
        A function that takes the module's arguments and returns the explanation for this rank, which prints as tables.

    Raises:
        TypeError: not a DDP module.
        CompileError: no result needs gradients, they are not reduced, as under ``no_sync()``, or each backward steps
            an optimizer.
    """
    compiled = ddp if isinstance(ddp, (CompiledModule, CompiledDDP)) else compile(ddp)
    runner = inspect_ddp(compiled)

    def explain(*args: Any, **kwargs: Any) -> DDPExplanation:
        def step() -> None:
            for parameter in runner.ddp.parameters():
                parameter.grad = None
            _sum_of_results(compiled(*args, **kwargs)).backward()

        if not runner.ddp.require_backward_grad_sync:
            raise CompileError("under no_sync() no gradients are reduced: call explain_ddp outside of it")
        if runner.options.step_in_backward is not None:
            raise CompileError(
                "explain_ddp runs backwards, which would step the optimizer of step_in_backward: explain the module "
                "compiled without it, whose gradients are reduced in the same way"
            )
        with _left_as_it_was(runner.ddp), torch.enable_grad():
            for _ in range(_SETTLING_STEPS):
                if runner.merge_plan is None:
                    step()
            for _ in range(_WARM_UP_STEPS):
                step()
            if runner.plan is None:
                return _explanation_of_reducer(runner)
            recorders = []
            for _ in range(_MEASURED_STEPS):
                _wait_for_all(runner.ddp)
                with record_timeline(compiled) as recorder:
                    step()
                recorders.append(recorder)
        recorders.sort(key=lambda recorder: recorder.timeline().exposed_ms)
        return _explanation(runner, recorders[len(recorders) // 2])

    return explain


def _explanation_of_reducer(runner: CompiledDDP) -> DDPExplanation:
    return DDPExplanation(
        reason_for_reducer=runner.reason_for_reducer or "",
        pieces=tuple(graph.pieces for graph in runner.reducer_way.graphs),
        stock_plan=_stock_plan(runner.ddp),
    )


def _explanation(runner: CompiledDDP, recorder: TimelineRecorder) -> DDPExplanation:
    plan, chosen, costs = runner.plan, runner.merge_plan, runner.costs
    measured = recorder.timeline()
    assert plan is not None
    arrived_ms = {name: 1e3 * (at_s - measured.start_s) for name, at_s in recorder.arrived_s().items()}
    return DDPExplanation(
        plan=plan,
        stock_plan=_stock_plan(runner.ddp, [parameter.name for parameter in plan.parameters]),
        reasons=() if chosen is None else chosen.reasons,
        segments=_segments(runner, measured),
        ready_ms=arrived_ms,
        predicted=None if costs is None else simulate(plan, costs),
        measured=measured,
    )


def _segments(runner: CompiledDDP, measured: Timeline) -> tuple[ExplainedSegment, ...]:
    """Those that ran, in order."""
    stores = {
        label + compute.name: tuple(compute.destinations.values())
        for label, backward in labelled_backwards(runner).items()
        for compute in backward.schedule.computes
    }
    ran = sorted(
        (interval for interval in measured.intervals if interval.kind == "compute"),
        key=lambda interval: interval.start_s,
    )
    return tuple(
        ExplainedSegment(interval.label, stores[interval.label], 1e3 * (interval.end_s - interval.start_s))
        for interval in ran
    )


def _stock_plan(ddp: DistributedDataParallel, ready: Sequence[str] = ()) -> BucketPlan:
    """The reducer's buckets; predicted for gradients that come in this order, where it has not rebuilt them itself."""
    parameters = reduced_parameters(ddp)
    described, names = describe(parameters), {parameter: name for name, parameter in parameters.items()}
    groups = [
        tuple(described[names[parameter]] for parameter in bucket)  # type: ignore[index]
        for bucket in stock_buckets(ddp, [parameters[name] for name in ready])
    ]
    buckets = tuple(pack_bucket(index, group) for index, group in enumerate(groups))
    return BucketPlan(tuple(itertools.chain(*groups)), buckets)


def _wait_for_all(ddp: DistributedDataParallel) -> None:
    """Else a rank that is early counts its waiting as part of an all-reduce."""
    arrived = torch.zeros(1, device=next(ddp.parameters()).device)
    dist.all_reduce(arrived, group=process_group(ddp))
    arrived.item()


def _sum_of_results(results: Any) -> torch.Tensor:
    tensors = [
        tensor for tensor in find_tensors(results) if tensor.requires_grad and tensor.is_floating_point()
    ]
    if not tensors:
        raise CompileError("no result of the module needs gradients, so there are none to reduce")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


@contextmanager
def _left_as_it_was(ddp: DistributedDataParallel) -> Iterator[None]:
    """Gradients, buffers and torch's random state are afterwards what they were before, and so is whether buffers are
    to be sent before the next forward."""
    gradients = [(parameter, parameter.grad) for parameter in ddp.parameters()]
    values = [None if gradient is None else gradient.clone() for _, gradient in gradients]
    buffers = [(buffer, buffer.clone()) for buffer in ddp.buffers()]
    # A forward may put other tensors in their places.
    tables = [(part._buffers, dict(part._buffers)) for part in ddp.modules()]
    sends_buffers = ddp.require_forward_param_sync
    devices = {parameter.device for parameter in ddp.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng([device.index for device in devices]):
        try:
            yield
        finally:
            ddp.require_forward_param_sync = sends_buffers
            for table, held in tables:
                table.update(held)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
                for (parameter, gradient), value in zip(gradients, values, strict=True):
                    parameter.grad = None if gradient is None or value is None else gradient.copy_(value)
