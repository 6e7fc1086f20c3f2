"""Schedules as data: what is wrong with them is found, what torch's do is proven, and their step is predicted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradsplit.bucketing import (
    Action,
    PipelineSchedule,
    StageCost,
    check_schedule,
    plot_pipeline,
    simulate_pipeline,
)
from gradsplit.bucketing.check_schedule import peak_bytes
from gradsplit.bucketing.pipeline_schedule import SENDS
from gradsplit.distributed.pipeline.torch_schedules import SINGLE, torch_schedule
from tests.bucketing.prove_schedules import built_in

Rows = list[list[Action]]


def test_torchs_schedules_run() -> None:
    """`make pipelines` does so for 2 to 16 stages and 2 to 64 microbatches."""
    checked: Counter[str] = Counter()
    for name, schedule in built_in((2, 3, 4), (2, 4, 8, 12)):
        assert check_schedule(schedule) == [], name
        assert PipelineSchedule.parse(str(schedule)) == schedule
        checked[name.split()[0]] += 1
    assert checked == {
        "GPipe": 12, "1F1B": 10, "Interleaved1F1B": 24, "LoopedBFS": 24, "InterleavedZeroBubble": 24,
        "ZBVZeroBubble": 12, "DualPipeV": 7,
    }  # fmt: skip


# Each fault takes the rows of a schedule that runs and makes them wrong for certain.


def place_of(rows: Rows, chance: random.Random, *kinds: str) -> tuple[int, int]:
    found = [
        (r, k) for r, row in enumerate(rows) for k, one in enumerate(row) if not kinds or one.kind in kinds
    ]
    return chance.choice(found)


def leave_out(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance)
    del rows[rank][place]


def do_twice(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance)
    rows[rank].insert(chance.randrange(len(rows[rank]) + 1), rows[rank][place])


def another_microbatch(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance)
    one = rows[rank][place]
    rows[rank][place] = Action(one.stage, one.kind, one.microbatch + chance.choice([1, 2]))


def another_stage(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance)
    one = rows[rank][place]
    rows[rank][place] = Action(one.stage + 1, one.kind, one.microbatch)


def another_rank(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance)
    one = rows[rank].pop(place)
    other = rows[(rank + 1) % len(rows)]
    other.insert(chance.randrange(len(other) + 1), one)


def backward_first(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance, "B", "I")
    one = rows[rank].pop(place)
    rows[rank].insert(rows[rank].index(Action(one.stage, "F", one.microbatch)), one)


def send_before_it_is_there(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance, *SENDS)
    one = rows[rank].pop(place)
    kinds = ("F",) if one.kind == "SEND_F" else ("B", "I")
    about = (one.stage, one.microbatch)
    made = next(
        k
        for k, other in enumerate(rows[rank])
        if other.kind in kinds and (other.stage, other.microbatch) == about
    )
    rows[rank].insert(made, one)


def receive_too_late(rows: Rows, chance: random.Random) -> None:
    rank, place = place_of(rows, chance, "RECV_F", "RECV_B")
    one = rows[rank].pop(place)
    rows[rank].append(one)


def wait_for_each_other(rows: Rows, chance: random.Random) -> None:
    """A stage sends a microbatch on only when its gradient has come back."""
    rank, place = place_of(rows, chance, "RECV_B")
    back = rows[rank][place]
    send = Action(back.stage, "SEND_F", back.microbatch)
    rows[rank].remove(send)
    rows[rank].insert(rows[rank].index(back) + 1, send)


def another_order(rows: Rows, chance: random.Random) -> None:
    """Two messages to one rank change places, on one side only."""
    rank, _ = place_of(rows, chance, *SENDS)
    stage_rank = {one.stage: r for r, row in enumerate(rows) for one in row}
    sends = [k for k, one in enumerate(rows[rank]) if one.kind in SENDS]
    to = stage_rank[rows[rank][sends[0]].peer_stage]
    sends = [k for k in sends if stage_rank[rows[rank][k].peer_stage] == to]
    first, second = sends[-2:]
    one, two = rows[rank][first], rows[rank][second]
    assert one != two
    rows[rank][first], rows[rank][second] = two, one


FAULTS: tuple[Callable[[Rows, random.Random], None], ...] = (
    leave_out, do_twice, another_microbatch, another_stage, another_rank, backward_first, send_before_it_is_there,
    receive_too_late, wait_for_each_other, another_order,
)  # fmt: skip


def test_planted_faults_are_found() -> None:
    chance = random.Random(0)
    schedules = [schedule for _, schedule in built_in((2, 4), (4, 8))]
    kinds: set[str] = set()
    for number in range(500):
        schedule, plant = chance.choice(schedules), FAULTS[number % len(FAULTS)]
        rows = [list(row) for row in schedule.rows]
        plant(rows, chance)
        changed = PipelineSchedule(tuple(map(tuple, rows)), schedule.num_stages, schedule.microbatches)
        faults = check_schedule(changed)
        assert faults, f"{plant.__name__} {number}\n{changed}"
        kinds.add(faults[0].split()[0])
    assert len(kinds) > 5


@pytest.mark.parametrize(("name", "in_flight"), [("GPipe", 8), ("1F1B", 4)])
def test_memory_is_checked(name: str, in_flight: int) -> None:
    schedule = torch_schedule(name, 4, 4, 8)
    assert peak_bytes(schedule, [10] * 4)[0] == 10 * in_flight
    assert check_schedule(schedule, kept_bytes=[10] * 4, limit_bytes=[10 * in_flight] * 4) == []
    (fault,) = check_schedule(schedule, kept_bytes=[10] * 4, limit_bytes=[10 * in_flight - 1, 99, 99, 99])
    assert (
        fault
        == f"rank 0 keeps {10 * in_flight} bytes for microbatches in flight, and has {10 * in_flight - 1}"
    )


def test_the_bubble_is_that_of_the_literature() -> None:
    """(stages - 1) / (microbatches + stages - 1) of GPipe and 1F1B; less where the weights wait."""
    costs = [StageCost(1.0, 1.0, 1.0)] * 4
    for name in SINGLE:
        assert simulate_pipeline(torch_schedule(name, 4, 4, 8), costs).bubble == pytest.approx(3 / 11)
    split = simulate_pipeline(torch_schedule("InterleavedZeroBubble", 4, 4, 8), costs)
    assert split.bubble < 3 / 11 - 0.05
    assert simulate_pipeline(torch_schedule("ZBVZeroBubble", 4, 8, 8), costs * 2).bubble < split.bubble


def test_messages_take_time() -> None:
    costs = [StageCost(1.0, 1.0, 1.0, 0.5, 0.25)] * 2
    schedule = PipelineSchedule.parse("0F0 0B0\n1F0 1B0")
    # Forward, half a second, forward and backward, a quarter, backward.
    assert simulate_pipeline(schedule, costs).duration_s == pytest.approx(1 + 0.5 + 1 + 2 + 0.25 + 2)
    # A rank is busy between its forward and its backward, too; the first one has time for that.
    busy = [replace(cost, between_s=0.125) for cost in costs]
    assert simulate_pipeline(schedule, busy).duration_s == pytest.approx(1 + 0.5 + 1 + 0.125 + 2 + 0.25 + 2)


def test_ranks_that_vary_wait_for_the_slower_one() -> None:
    schedule, costs = torch_schedule("1F1B", 2, 2, 8), [StageCost(1.0, 0.5, 0.5)] * 2
    varied = itertools.cycle([0.5, 1.5, 1.5, 0.5, 1.0])
    timeline = simulate_pipeline(
        schedule, costs, lambda stage, kind: next(varied) if kind in ("F", "B") else 0.0
    )
    assert timeline.bubble > simulate_pipeline(schedule, costs).bubble + 0.05


def test_what_does_not_run_is_one_line() -> None:
    with pytest.raises(ValueError, match="'0X0' is no action"):
        PipelineSchedule.parse("0X0")
    with pytest.raises(ValueError, match="no rank can go on: 0B0"):
        PipelineSchedule.parse("0B0 0F0\n1F0 1B0")
    with pytest.raises(ValueError, match="1F1B does not put 4 stages on 2 ranks"):
        torch_schedule("1F1B", 2, 4, 4)
    with pytest.raises(ValueError, match="does not run: 0F0 is there 2 times"):
        simulate_pipeline(PipelineSchedule.parse("0F0 0F0 0B0"), [StageCost(1, 1, 1)])


def test_a_step_is_drawn(tmp_path: Path) -> None:
    costs = [StageCost(1, 1, 1, 0.1, 0.1, 5)] * 4
    timeline = simulate_pipeline(torch_schedule("InterleavedZeroBubble", 4, 4, 8), costs)
    plot_pipeline(timeline, tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")
    assert str(timeline).splitlines()[0].endswith("% of it bubble")
    assert len(str(timeline).splitlines()) == 5
