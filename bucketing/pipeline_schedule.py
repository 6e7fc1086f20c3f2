"""A pipeline schedule as data: for each rank the actions that it takes, one after the other.

    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1

An action is a stage, what it does and a microbatch, in the words of ``torch.distributed.pipelining``: F is a forward, I
the gradients of its inputs, W those of its weights, B both at once; SEND_F gives the next stage what a forward made,
and RECV_F takes what came from the one before; SEND_B and RECV_B are the way back. Neighbours on one rank send nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COMPUTE = ("F", "I", "W", "B")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
_ACTION = re.compile(r"(\d+)(F|I|W|B|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """What one stage does with one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ValueError: it is no action.
        """
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is no action of a pipeline; one is a stage, a kind and a microbatch: 2F0"
            )
        return Action(int(found[1]), found[2], int(found[3]))

    @property
    def peer_stage(self) -> int:
        """The stage that a send goes to, or that a receive comes from."""
        return self.stage + (1 if self.kind in ("SEND_F", "RECV_B") else -1)

    @property
    def counterpart(self) -> Action:
        """The receive of a send, and the other way round."""
        kind = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}[self.kind]
        return Action(self.peer_stage, kind, self.microbatch)


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of all ranks.

    Attributes:
        rows: by rank, in order.
        num_stages: of the pipeline.
        microbatches: of a step.
    """

    rows: tuple[tuple[Action, ...], ...]
    num_stages: int
    microbatches: int

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @staticmethod
    def parse(text: str) -> PipelineSchedule:
        """The schedule of a text: a line a rank, actions between blanks. Without sends and receives these are added.

        Raises:
            ValueError: a word is no action, or the actions wait for one another.
        """
        return schedule_of([map(Action.parse, line.split()) for line in text.strip().splitlines()])

    def rank_of_stages(self) -> dict[int, int]:
        """By stage the first rank that has it."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                found.setdefault(action.stage, rank)
        return found


def schedule_of(rows: Iterable[Iterable[Action]]) -> PipelineSchedule:
    """The schedule of these rows, with sends and receives if there are none.

    Raises:
        ValueError: the actions wait for one another.
    """
    given = tuple(map(tuple, rows))
    stages = 1 + max((action.stage for row in given for action in row), default=-1)
    microbatches = 1 + max((action.microbatch for row in given for action in row), default=-1)
    schedule = PipelineSchedule(given, stages, microbatches)
    has_messages = any(action.kind not in COMPUTE for row in given for action in row)
    return schedule if has_messages else add_messages(schedule)


def add_messages(schedule: PipelineSchedule) -> PipelineSchedule:
    """A schedule of computations alone, with its sends and receives: a result is sent when it is there, and received
    at that moment, so that both sides have the same order.

    Raises:
        ValueError: the computations wait for one another.
    """
    rank_of, last = schedule.rank_of_stages(), schedule.num_stages - 1
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    there: set[Action] = set()
    places = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            if places[rank] == len(row) or not is_ready(row[places[rank]], there, rank_of, last):
                continue
            action = row[places[rank]]
            places[rank], moved = places[rank] + 1, True
            rows[rank].append(action)
            there.add(action)
            message = message_of(action, rank_of, last)
            if message is not None:
                rows[rank].append(message)
                rows[rank_of[message.peer_stage]].append(message.counterpart)
                there |= {message, message.counterpart}
    waiting = [str(row[place]) for row, place in zip(schedule.rows, places, strict=True) if place < len(row)]
    if waiting:
        raise ValueError(f"no rank can go on: {', '.join(waiting)} wait for one another")
    return PipelineSchedule(tuple(map(tuple, rows)), schedule.num_stages, schedule.microbatches)


def message_of(action: Action, rank_of: Mapping[int, int], last: int) -> Action | None:
    """What is sent when a computation has run."""
    if action.kind == "F" and action.stage < last:
        message = Action(action.stage, "SEND_F", action.microbatch)
    elif action.kind in ("I", "B") and action.stage > 0:
        message = Action(action.stage, "SEND_B", action.microbatch)
    else:
        return None
    return None if rank_of.get(message.peer_stage) == rank_of[action.stage] else message


def needs_of(action: Action, rank_of: Mapping[int, int], last: int) -> list[tuple[Action, ...]]:
    """What must have happened before an action: of each tuple one."""
    stage, microbatch = action.stage, action.microbatch

    def made(*kinds: str, at: int = stage) -> tuple[Action, ...]:
        return tuple(Action(at, kind, microbatch) for kind in kinds)

    if action.kind == "F":
        before = stage - 1
        if stage == 0:
            return []
        return [made("F", at=before) if rank_of.get(before) == rank_of[stage] else made("RECV_F")]
    if action.kind in ("I", "B"):
        after = stage + 1
        if stage == last:
            return [made("F")]
        here = rank_of.get(after) == rank_of[stage]
        return [made("F"), made("I", "B", at=after) if here else made("RECV_B")]
    if action.kind == "W":
        return [made("I")]
    if action.kind in RECEIVES:
        return [(action.counterpart,)]
    return [made("F") if action.kind == "SEND_F" else made("I", "B")]


def is_ready(action: Action, there: set[Action], rank_of: Mapping[int, int], last: int) -> bool:
    """Whether all that an action needs has happened."""
    return all(there.intersection(options) for options in needs_of(action, rank_of, last))


def computations(row: Sequence[Action]) -> list[Action]:
    """The actions of a row without its messages."""
    return [action for action in row if action.kind in COMPUTE]
