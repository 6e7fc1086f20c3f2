"""Proves all of torch's pipeline schedules that it takes itself, for 2 to 16 stages and 2 to 64 microbatches.

python -m tests.bucketing.prove_schedules
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gradsplit.bucketing import PipelineSchedule, check_schedule
from gradsplit.distributed.pipeline.torch_schedules import IN_A_V, LOOPED, SINGLE, torch_schedule


def built_in(
    ranks: Sequence[int], microbatches: Sequence[int], most_stages: int = 16
) -> Iterator[tuple[str, PipelineSchedule]]:
    """All schedules of torch's on so many ranks that torch itself takes."""
    for name in (*SINGLE, *LOOPED, *IN_A_V):
        per_rank = (1,) if name in SINGLE else (2,) if name in IN_A_V else (1, 2)
        for count in ranks:
            for stages in (count * k for k in per_rank if count * k <= most_stages):
                for number in microbatches:
                    try:
                        yield f"{name} {count} {stages} {number}", torch_schedule(name, count, stages, number)
                    except ValueError:
                        continue  # too few microbatches, or no multiple of the ranks


def main() -> None:
    checked: Counter[str] = Counter()
    faulty = 0
    for name, schedule in built_in(range(1, 17), range(2, 65)):
        if schedule.num_stages < 2:
            continue
        faults = check_schedule(schedule)
        checked[name.split()[0]] += 1
        if faults:
            faulty += 1
            print(f"{name}: {faults[0]}", flush=True)
    for name, count in checked.items():
        print(f"{name}: {count} schedules")
    print(f"{sum(checked.values())} schedules, {faulty} do not run")
    raise SystemExit(faulty > 0)


if __name__ == "__main__":
    main()
