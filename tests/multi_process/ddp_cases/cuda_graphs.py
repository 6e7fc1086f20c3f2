"""``mode="reduce-overhead"``: backwards are replayed, and reduced as they would be without.

On the CPU a recorder of the tests stands in for CUDA's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import gradsplit
from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.bucketing.reducer_plan import reducer_plan
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.runtime.cuda_graphs import CudaRecorder, CudaReplay, graph_programs
from gradsplit.distributed import explain_ddp, inspect_ddp
from tests.multi_process.ddp_cases.buffers import check_steps_between_changes, with_batch_norm
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_buffers,
    check_close,
    check_gradients,
    check_in_graph,
    check_reducer,
    data,
    loss_of,
    pair,
    train,
)
from tests.runtime.recorder_on_cpu import LendingRecorder


class CountingRecorder(CudaRecorder):
    """CUDA's, which counts as the one for the CPU does."""

    segmented = 0
    against = ""

    def reason_against(self) -> str:
        return self.against or super().reason_against()

    def in_parts(self, within: CudaReplay | None = None) -> CudaRecorder:
        self.segmented += 1
        return super().in_parts(within)


@contextmanager
def recording() -> Iterator[Any]:
    """Compiled modules record with what this gives."""
    if DEVICE == "cuda":
        recorder: Any = CountingRecorder(torch.device("cuda", torch.cuda.current_device()))
    else:
        recorder = LendingRecorder()
    with mock.patch.object(
        pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=recorder)
    ):
        yield recorder


def make_pair(
    make: Callable[[], nn.Module] = with_batch_norm, fullgraph: bool = True, **ddp_options: Any
) -> tuple[Any, Any]:
    backend = "aot_eager" if DEVICE == "cpu" else "triton"
    return pair(make, backend=backend, mode="reduce-overhead", fullgraph=fullgraph, **ddp_options)


@case()
def replayed_steps_are_stock_ddps() -> None:
    with recording() as recorder:
        stock, compiled = make_pair()
        train((stock, compiled), steps=6)
        check_in_graph(compiled)
        check_buffers(stock, compiled)
        recorded = recorder.segmented
        assert recorded > 0
        train((stock, compiled), steps=3, first_step=6)
        assert recorder.segmented == recorded, "steps that are alike were recorded again"


@case()
def replayed_forwards_take_buffers_as_they_were_sent() -> None:
    with recording() as recorder:
        stock, compiled = make_pair()
        check_steps_between_changes(stock, compiled, steps=6)
        assert recorder.segmented > 0


@case()
def replays_among_other_backwards() -> None:
    """Whatever a gradient is added to, and whatever runs between: one after the other on the same two modules."""
    with recording() as recorder:
        models = stock, compiled = make_pair(Net)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for step in range(12):
            outputs = []
            for model, optimizer in zip(models, optimizers, strict=True):
                if step % 4 != 3:  # else the last step's gradients stay
                    optimizer.zero_grad(set_to_none=step % 4 != 2)
                if step % 3 == 2:
                    with model.no_sync():
                        loss_of(model(data(100 + step))).backward()
                loss_of(model(data(step))).backward()
                if step == 5:  # several forwards before one backward
                    (loss_of(model(data(200))) + 2 * loss_of(model(data(201)))).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                model.eval()
                with torch.no_grad():
                    outputs.append(model(data(step)))
                model.train()
            check_gradients(stock, compiled)
            check_close(outputs[1], outputs[0])
            for optimizer in optimizers:
                optimizer.step()
        assert recorder.segmented > 0


@case()
def one_rank_replays_and_the_others_do_not() -> None:
    with recording() as recorder:
        stock, compiled = make_pair()
        train((stock, compiled), steps=3)
        recorder.against = "" if dist.get_rank() == 0 else "this rank does not"
        train((stock, compiled), steps=3, first_step=3)
        recorder.against = ""
        train((stock, compiled), steps=2, first_step=6)


class TwoHeads(nn.Module):
    """The first result does not depend on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return hidden, self.head(hidden)


@case()
def gradients_that_do_not_come_are_missing_in_replays() -> None:
    with recording():
        _, compiled = make_pair(TwoHeads)
        for step in range(4):
            compiled.zero_grad()
            hidden, scores = compiled(data(step))
            (hidden.sum() if step == 3 else hidden.sum() + loss_of(scores)).backward()
        assert compiled.module.head.weight.grad is None


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(self.first(x)))
        gradsplit.graph_break()
        return self.third(self.norm(hidden))


@case()
def gradients_from_several_sides() -> None:
    """From two graphs; from a graph and the engine, which runs hooks."""
    with recording() as recorder:
        for make in (Broken, Net):
            recorded = recorder.segmented
            models = make_pair(make, fullgraph=make is Net)
            if make is Net:
                for model in models:
                    model.module.second.weight.register_hook(lambda gradient: 2 * gradient)
            train(models, steps=4)
            check_in_graph(models[1])
            assert recorder.segmented > recorded, f"no backward of {make.__name__} was recorded"


@case()
def replays_under_stock_ddps_reducer() -> None:
    """The reducer copies what is replayed, in pieces that fit its buckets, unless somebody still holds it."""
    with recording():
        stock, compiled = make_pair(Net, find_unused_parameters=True)
        train((stock, compiled), steps=4)
        for step in range(4, 7):
            for model in (stock, compiled):
                model.zero_grad(set_to_none=False)
                loss_of(model(data(step))).backward()
            check_gradients(stock, compiled)
        check_reducer(compiled, "find_unused_parameters")


@case()
def replays_are_measured() -> None:
    with recording() as recorder:
        _, compiled = make_pair()
        explanation = explain_ddp(compiled)(data(0))
        assert recorder.segmented > 0
        assert explanation.measured is not None and explanation.plan is not None
        kinds = [interval.kind for interval in explanation.measured.intervals]
        assert kinds.count("compute") == len(explanation.segments)
        assert kinds.count("all_reduce") == len(explanation.plan.buckets)


@case()
def another_plan_is_recorded_anew() -> None:
    with recording() as recorder:
        stock, compiled = make_pair()
        train((stock, compiled), steps=4)
        recorded, buckets = recorder.segmented, inspect_ddp(compiled).buckets
        assert buckets is not None and recorded > 0
        buckets.adopt(one_bucket(buckets.plan))
        train((stock, compiled), steps=4, first_step=4)
        assert recorder.segmented > recorded


def one_bucket(plan: BucketPlan | None) -> BucketPlan:
    assert plan is not None and len(plan.buckets) > 1
    parameters = [parameter for bucket in plan.buckets for parameter in bucket.parameters]
    return reducer_plan(parameters, [1 << 20])
