"""Torch's runtime of pipeline schedules, which takes rows of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsplit.compile_core.torch_facts.private_parts import private

_MODULE = "torch.distributed.pipelining.schedules"

PipelineScheduleRuntime = private(
    f"{_MODULE}:_PipelineScheduleRuntime", "running one's own pipeline schedules"
)
TorchAction = private(f"{_MODULE}:_Action", "running one's own pipeline schedules")
# Takes operations of ``torch.distributed.P2POp``, and starts them as the schedule of a peer does: NCCL has connections
# of their own for messages that are started together. Returns what is to be waited for.
start_messages = private(f"{_MODULE}:_batch_p2p", "pipelines whose sizes differ between steps")


def prepare_schedule(runtime: Any, rows: Mapping[int, Sequence[Any]]) -> None:
    """Gives a runtime the computations of each rank; it adds the messages."""
    runtime.pipeline_order = dict(rows)
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
