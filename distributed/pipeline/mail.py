"""What stages send one another beside what torch's schedules do, which is from neighbour to neighbour.

A message is sent as soon as it is there, and waited for at the end of the step; who needs one waits until it arrives.
Since it was sent before what came through the neighbours, on which the reader also waits, nobody waits for ever.

Where a group has tags, as gloo's have, the tag says what a message is, so that it does not matter in which order a rank
reads what others have sent. NCCL has none: what one sends is read in that order. There, what goes from one stage to
another is a *lane* with a communicator of its own. All stages go through microbatches in one order, and through the
edges of a microbatch by their positions; each message brings its name along, which is compared where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsplit.distributed.pipeline.layout import PipelineLayout

# Torch's schedules use tag 0.
_FIRST_TAG = 1
FORWARD, BACKWARD = range(2)


@dataclass(frozen=True, order=True)
class Lane:
    """From one stage to another: values, or gradients the other way."""

    kind: int
    sender: int
    reader: int


@dataclass(frozen=True)
class Message:
    """What a message is about: its lane, the position of its edge, and the microbatch."""

    lane: Lane
    edge: int
    microbatch: int


def lanes_of(layout: PipelineLayout) -> list[Lane]:
    """All on which messages go that torch's schedules do not bring."""
    found = set()
    for edge in layout.edges:
        for consumer in edge.consumers:
            if not edge.is_state and consumer == edge.producer + 1:
                continue
            found.add(Lane(FORWARD, edge.producer, consumer))
            if edge.requires_grad:
                found.add(Lane(BACKWARD, consumer, edge.reader_before(consumer)))
    return sorted(found)


class Mail:
    """A rank's messages of one step.

    Args:
        group: of the pipeline's ranks.
        num_stages: of the pipeline.
        has_tags: see the module; else ``open_lanes`` comes before the first message.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_stages: int, has_tags: bool) -> None:
        self._group, self._num_stages, self._has_tags = group, num_stages, has_tags
        self._here: dict[Message, torch.Tensor] = {}
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._groups: dict[Lane, Any] = {}
        self._rank_of: dict[int, int] | None = None
        self._names: dict[Message, torch.Tensor] = {}

    def open_lanes(self, layout: PipelineLayout, rank_of: Mapping[int, int], device: torch.device) -> None:
        """Makes communicators for the lanes, once for all steps in which stages are on these ranks; all ranks call it
        alike.

        Args:
            rank_of: by stage, its rank in the group.

        Raises:
            ValueError: they cannot be made in a part of the world.
        """
        if self._has_tags or self._rank_of == rank_of:
            return
        self._groups, self._rank_of = {}, dict(rank_of)
        lanes = lanes_of(layout)
        everyone: Any = dist.group.WORLD
        group = self._group or everyone
        in_a_part = dist.get_world_size(group) < dist.get_world_size()
        if in_a_part and lanes and everyone.bound_device_id is not None:
            raise ValueError(
                "where several pipelines have values that go past a neighbour, or weights that two stages read, call "
                "init_process_group without device_id: with it, all of its ranks make every communicator together"
            )
        own = dist.get_rank(group)
        # Each rank comes to its lanes in this order, so the first one that is still to be made finds both of its ranks.
        for lane in lanes:
            ranks = {rank_of[lane.sender], rank_of[lane.reader]}
            if len(ranks) == 1:
                continue
            made: Any = dist.new_group(
                [dist.get_global_rank(group, rank) for rank in ranks],
                backend=dist.get_backend_config(group),
                use_local_synchronization=in_a_part,
            )
            if own in ranks:
                self._groups[lane] = made
                # NCCL connects two ranks for messages at the first one, for which each waits: a rank in the middle of a
                # step might wait for one that waits for it elsewhere.
                first, peer = torch.zeros(1, device=device), int(own == min(ranks))
                if own == rank_of[lane.sender]:
                    dist.send(first, group=made, group_dst=peer)
                else:
                    dist.recv(first, group=made, group_src=peer)

    def send(self, message: Message, flat: torch.Tensor, rank: int) -> None:
        """To a rank of the group, or to another stage of this one."""
        if rank == dist.get_rank(self._group):
            self._here[message] = flat
        elif self._has_tags:
            self._start(flat, self._group, rank, self._tag(message))
        else:
            lane, peer = self._lane(message, rank)
            self._start(self._name(message, flat.device), lane, peer)
            self._start(flat, lane, peer)

    def receive(self, message: Message, empty: Callable[[], torch.Tensor], rank: int) -> torch.Tensor:
        """A message that lies here, or that arrives in memory of ``empty``."""
        if rank == dist.get_rank(self._group):
            return self._here.pop(message)
        flat = empty()
        if self._has_tags:
            dist.recv(flat, group=self._group, group_src=rank, tag=self._tag(message))
            return flat
        lane, peer = self._lane(message, rank)
        expected = self._name(message, flat.device)
        name = torch.empty_like(expected)
        dist.recv(name, group=lane, group_src=peer)
        dist.recv(flat, group=lane, group_src=peer)
        # On a GPU this stops the program later, but before wrong numbers come back to the host.
        torch.ops.aten._assert_async.msg(
            (name == expected).all(),
            f"stages {message.lane.sender} and {message.lane.reader} of a pipeline go through microbatches in "
            "different orders, which takes a group of gloo",
        )
        return flat

    def wait_for_sends(self) -> None:
        """Until all that was sent has arrived."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()
        self._here.clear()

    def _start(self, flat: torch.Tensor, group: dist.ProcessGroup | None, rank: int, tag: int = 0) -> None:
        self._sends.append((dist.isend(flat, group=group, group_dst=rank, tag=tag), flat))

    def _lane(self, message: Message, rank: int) -> tuple[Any, int]:
        """Its group, and the other rank's place in it."""
        return self._groups[message.lane], int(rank > dist.get_rank(self._group))

    def _name(self, message: Message, device: torch.device) -> torch.Tensor:
        if message not in self._names:
            name = [*astuple(message.lane), message.edge, message.microbatch]
            self._names[message] = torch.tensor(name, device=device)
        return self._names[message]

    def _tag(self, message: Message) -> int:
        place = (message.microbatch * self._num_stages + message.lane.reader) * 2 + message.lane.kind
        return _FIRST_TAG + message.edge + (place << 12)
