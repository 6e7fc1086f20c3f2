"""Torch's runtime of pipeline schedules, which takes rows of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

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


class StageOfRanks(PipelineStage):
    """Torch's stage, but that ranks send nothing to themselves.

    Schedules of torch 2.11 begin with a message from each stage to the next, and back; gloo has no connection of a rank
    to itself, so no schedule in a V would begin. What goes from one stage of a rank to another is no message later on.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]
