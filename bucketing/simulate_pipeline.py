"""A pipeline's step, predicted: when each rank computes what, how long it waits, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradsplit.bucketing.check_schedule import check_schedule, peak_bytes
from gradsplit.bucketing.pipeline_schedule import COMPUTE, SENDS, Action, PipelineSchedule, needs_of

BETWEEN = "between"


@dataclass(frozen=True)
class StageCost:
    """What a microbatch costs in a stage: seconds of each computation, of sending its results on, of sending gradients
    back, of what its rank does between a computation and the next one, and the bytes that are kept between its forward
    and its last gradient."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    between_s: float = 0.0
    kept_bytes: int = 0

    def seconds(self, kind: str) -> float:
        """Of one computation or send, or of what is ``BETWEEN``."""
        return {
            "F": self.forward_s,
            "I": self.backward_input_s,
            "W": self.backward_weight_s,
            "B": self.backward_input_s + self.backward_weight_s,
            "SEND_F": self.send_forward_s,
            "SEND_B": self.send_backward_s,
            BETWEEN: self.between_s,
        }[kind]


@dataclass(frozen=True)
class ComputeSpan:
    """An action that computes, and when."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineTimeline:
    """A step, predicted or measured: by rank its computations in order, and bytes at the most."""

    rows: tuple[tuple[ComputeSpan, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """From the first start to the last end."""
        spans = [span for row in self.rows for span in row]
        return max((span.end_s for span in spans), default=0.0) - min(
            (span.start_s for span in spans), default=0.0
        )

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        busy = sum(span.end_s - span.start_s for row in self.rows for span in row)
        whole = self.duration_s * len(self.rows)
        return 1 - busy / whole if whole else 0.0

    def __str__(self) -> str:
        lines = [f"{1e3 * self.duration_s:.2f} ms, {100 * self.bubble:.1f} % of it bubble"]
        for rank, (row, peak) in enumerate(zip(self.rows, self.peak_bytes, strict=True)):
            busy = sum(span.end_s - span.start_s for span in row)
            lines.append(
                f"rank {rank}: computes for {1e3 * busy:.2f} ms, keeps {peak / 2**20:.1f} MiB at the most"
            )
        return "\n".join(lines)


def simulate_pipeline(
    schedule: PipelineSchedule, costs: Sequence[StageCost], draw: Callable[[int, str], float] | None = None
) -> PipelineTimeline:
    """The step of a schedule: a rank takes its actions in order, and waits where something has not arrived yet.

    Args:
        costs: by stage. Sends take no time of a rank; what is sent arrives later by its seconds, and two messages from
            one rank to another one come one after the other.
        draw: the seconds of a stage and a kind of action, or ``BETWEEN``, instead of those in ``costs``: where they
            vary, ranks wait again and again for the slower one of them, so for longer than with the mean of each.

    Raises:
        ValueError: the schedule does not run; see ``check_schedule``.
    """
    faults = check_schedule(schedule)
    if faults:
        raise ValueError(f"the schedule does not run: {faults[0]}")
    seconds = draw or (lambda stage, kind: costs[stage].seconds(kind))
    rank_of, last = schedule.rank_of_stages(), schedule.num_stages - 1
    ends: dict[Action, float] = {}
    free = [0.0] * len(schedule.rows)
    wires: dict[tuple[int, int], float] = {}
    rows: list[list[ComputeSpan]] = [[] for _ in schedule.rows]
    places = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                needs = [
                    [ends[one] for one in options if one in ends]
                    for options in needs_of(action, rank_of, last)
                ]
                if not all(needs):
                    break
                ready = max([0.0, *(min(found) for found in needs)])
                if action.kind in COMPUTE:
                    start = max(free[rank], ready)
                    ends[action] = start + seconds(action.stage, action.kind)
                    free[rank] = ends[action] + seconds(action.stage, BETWEEN)
                    rows[rank].append(ComputeSpan(action, start, ends[action]))
                elif action.kind in SENDS:
                    wire = rank, rank_of[action.peer_stage]
                    takes = seconds(action.stage, action.kind)
                    ends[action] = wires[wire] = max(wires.get(wire, 0.0), ready) + takes
                else:
                    ends[action] = ready
                places[rank], moved = places[rank] + 1, True
    kept = [cost.kept_bytes for cost in costs]
    return PipelineTimeline(tuple(map(tuple, rows)), tuple(peak_bytes(schedule, kept)))
