"""Torch's pipeline schedules as data, and data as a schedule that torch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from gradsplit.bucketing.check_schedule import check_schedule
from gradsplit.bucketing.pipeline_schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    PipelineSchedule,
    schedule_of,
)
from gradsplit.compile_core.torch_facts.pipelining import (
    PipelineScheduleRuntime,
    TorchAction,
    prepare_schedule,
)

# One stage a rank; two on each rank, there and back; any number on each rank.
SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


def torch_schedule(name: str, num_ranks: int, num_stages: int, microbatches: int) -> PipelineSchedule:
    """What a schedule of torch's does, with its sends and receives.

    Args:
        name: as ``torch.distributed.pipelining.schedules.get_schedule_class`` takes it.

    Raises:
        ValueError: it is none, or does not take so many ranks, stages or microbatches.
    """
    if num_stages % num_ranks or (name in SINGLE and num_stages != num_ranks):
        raise ValueError(f"{name} does not put {num_stages} stages on {num_ranks} ranks")
    kind: Any = get_schedule_class(name)
    stages = [_stand_in(stage, num_ranks, num_stages) for stage in range(0, num_stages, num_ranks)]
    if name in SINGLE:
        kind(stages[0], microbatches)  # raises what torch has against these numbers
        return schedule_of([_single_row(name, rank, num_ranks, microbatches) for rank in range(num_ranks)])
    made = kind(stages, microbatches)
    rows = made.pipeline_order_with_comms
    return schedule_of([_actions(rows[rank]) for rank in range(num_ranks)])


def _single_row(name: str, stage: int, num_stages: int, microbatches: int) -> Iterator[Action]:
    """What the loops of torch's schedules for one stage a rank do; torch 2.13 has another table of 1F1B."""
    ahead = microbatches if name == "GPipe" else min(microbatches, num_stages - stage)
    for microbatch in range(ahead):
        yield Action(stage, "F", microbatch)
    for microbatch in range(microbatches):
        yield Action(stage, "B", microbatch)
        if microbatch + ahead < microbatches:
            yield Action(stage, "F", microbatch + ahead)


def _stand_in(stage: int, num_ranks: int, num_stages: int) -> Any:
    return SimpleNamespace(
        num_stages=num_stages,
        stage_index=stage,
        group_rank=0,
        group_size=num_ranks,
        submod=torch.nn.Module(),
        has_backward=False,
    )


def _actions(row: Sequence[Any]) -> Iterator[Action]:
    for action in row:
        if action is None:
            continue
        for one in action.sub_actions or (action,):
            kind = one.computation_type.value
            if kind in (*COMPUTE, *SENDS, *RECEIVES):
                yield Action(one.stage_index, kind, one.microbatch_index)


def run_schedule(
    schedule: PipelineSchedule,
    stages: Sequence[Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> PipelineScheduleMulti:
    """A schedule of one's own for torch's runtime: what it returns has ``step()``.

    Args:
        schedule: its computations are run in the order of its rows; torch places the messages.
        stages: those of this rank.
        loss_fn, options: as torch's schedules take them.

    Raises:
        ValueError: the schedule does not run, or is not for these stages.
    """
    faults = check_schedule(schedule)
    if faults:
        raise ValueError(f"the schedule does not run: {faults[0]}")
    stage = stages[0]
    if (schedule.num_stages, len(schedule.rows)) != (stage.num_stages, stage.group_size):
        raise ValueError(
            f"the schedule is for {schedule.num_stages} stages on {len(schedule.rows)} ranks, and there are "
            f"{stage.num_stages} on {stage.group_size}"
        )
    made = PipelineScheduleRuntime(list(stages), schedule.microbatches, loss_fn, **options)
    rows = {
        rank: [TorchAction.from_str(str(action)) for action in row if action.kind in COMPUTE]
        for rank, row in enumerate(schedule.rows)
    }
    prepare_schedule(made, rows)
    return made
