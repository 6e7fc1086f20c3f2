"""Proves of a pipeline schedule, before its first step, that it runs: every microbatch through every stage and back,
each send received, in one order on both sides, nobody waiting for ever, and no rank short of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gradsplit.bucketing.pipeline_schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    PipelineSchedule,
    is_ready,
    message_of,
)


def check_schedule(
    schedule: PipelineSchedule,
    *,
    kept_bytes: Sequence[int] = (),
    limit_bytes: Sequence[int] = (),
) -> list[str]:
    """What is wrong with a schedule; nothing if it runs.

    Args:
        kept_bytes: by stage, what a microbatch takes from its forward to its last gradient.
        limit_bytes: by rank, what there is for all of these.
    """
    faults = [
        *_faults_of_stages(schedule),
        *_faults_of_computations(schedule),
        *_faults_of_messages(schedule),
    ]
    # What follows takes the schedule to be complete.
    faults = faults or [*_faults_of_order(schedule)]
    if not faults and limit_bytes:
        for rank, (peak, limit) in enumerate(zip(peak_bytes(schedule, kept_bytes), limit_bytes, strict=True)):
            if peak > limit:
                faults.append(f"rank {rank} keeps {peak} bytes for microbatches in flight, and has {limit}")
    return faults


def peak_bytes(schedule: PipelineSchedule, kept_bytes: Sequence[int]) -> list[int]:
    """By rank, the most that it keeps at once for microbatches whose gradients are not all there yet."""
    peaks = []
    for row in schedule.rows:
        now = most = 0
        for action in row:
            if action.kind == "F":
                now += kept_bytes[action.stage]
                most = max(most, now)
            elif action.kind in ("B", "W"):
                now -= kept_bytes[action.stage]
        peaks.append(most)
    return peaks


def _faults_of_stages(schedule: PipelineSchedule) -> Iterator[str]:
    rank_of = schedule.rank_of_stages()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if rank_of[action.stage] != rank:
                yield f"{action} on rank {rank}: stage {action.stage} is on rank {rank_of[action.stage]}"
            if action.stage >= schedule.num_stages or action.microbatch >= schedule.microbatches:
                yield f"{action} on rank {rank}: there is no such stage or microbatch"
    for stage in range(schedule.num_stages):
        if stage not in rank_of:
            yield f"stage {stage} is on no rank"


def _faults_of_computations(schedule: PipelineSchedule) -> Iterator[str]:
    for row in schedule.rows:
        counts = Counter(action for action in row if action.kind in COMPUTE)
        for stage in sorted({action.stage for action in row}):
            for microbatch in range(schedule.microbatches):
                found = {kind: counts[Action(stage, kind, microbatch)] for kind in COMPUTE}
                if found["F"] != 1:
                    yield f"{stage}F{microbatch} is there {found['F']} times"
                whole, parts = found["B"], (found["I"], found["W"])
                if (whole, parts) not in ((1, (0, 0)), (0, (1, 1))):
                    yield (
                        f"the backward of stage {stage} and microbatch {microbatch} is there {whole} times as B, "
                        f"{parts[0]} as I and {parts[1]} as W"
                    )


def _faults_of_messages(schedule: PipelineSchedule) -> Iterator[str]:
    rank_of, last = schedule.rank_of_stages(), schedule.num_stages - 1
    expected: Counter[Action] = Counter()
    for row in schedule.rows:
        for action in row:
            message = message_of(action, rank_of, last) if action.kind in COMPUTE else None
            if message is not None:
                expected[message] += 1
                expected[message.counterpart] += 1
    found = Counter(action for row in schedule.rows for action in row if action.kind not in COMPUTE)
    for action in sorted((expected - found) | (found - expected)):
        yield f"{action} is there {found[action]} times, and should be {expected[action]} times"


def _faults_of_order(schedule: PipelineSchedule) -> Iterator[str]:
    rank_of, last = schedule.rank_of_stages(), schedule.num_stages - 1
    ranks = range(len(schedule.rows))
    for sender in ranks:
        for reader in ranks:
            sent = [
                action.counterpart
                for action in schedule.rows[sender]
                if action.kind in SENDS and rank_of[action.peer_stage] == reader
            ]
            taken = [
                action
                for action in schedule.rows[reader]
                if action.kind in RECEIVES and rank_of[action.peer_stage] == sender
            ]
            for here, there in zip(sent, taken, strict=True):
                if here != there:
                    yield f"rank {reader} takes {there} where rank {sender} sends {here.counterpart}"
                    break
    there_yet: set[Action] = set()
    places = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row) and is_ready(row[places[rank]], there_yet, rank_of, last):
                there_yet.add(row[places[rank]])
                places[rank], moved = places[rank] + 1, True
    stuck = [
        f"rank {rank} at {row[place]}"
        for rank, (row, place) in enumerate(zip(schedule.rows, places, strict=True))
        if place < len(row)
    ]
    if stuck:
        yield f"deadlock: {', '.join(stuck)}"
