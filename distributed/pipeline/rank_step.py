"""A step of the pipeline on one rank: what its stages do together.

Torch's generator, the messages and the end of the step belong to the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from gradsplit.distributed.pipeline.draws import set_state, state_of, states_of_forwards
from gradsplit.distributed.pipeline.layout import PipelineLayout
from gradsplit.distributed.pipeline.mail import Mail, lanes_of


class Stage(Protocol):
    """What a step asks of a stage."""

    stage_index: int
    stage_index_to_group_rank: dict[int, int]

    def exchange_weights(self, send: bool) -> None: ...
    def complete_gradients(self) -> None: ...


class RankStep:
    """The steps of one rank's stages of one pipeline.

    Args:
        layout: of the pipeline.
        device: of its stages.
        group: of its ranks.
        has_tags: see ``Mail``.
    """

    def __init__(
        self, layout: PipelineLayout, device: torch.device, group: dist.ProcessGroup | None, has_tags: bool
    ) -> None:
        self.layout, self.device = layout, device
        self.mail = Mail(group, len(layout.stages), has_tags)
        self._loaded: set[int] = set()
        self._active: list[Stage] = []
        self._finished: list[Stage] = []
        self._running = False
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def note_loaded(self, stages: Iterable[int]) -> None:
        """Ranks of the group have loaded these."""
        self._loaded.update(stages)

    def begin(self, stage: Stage) -> None:
        """A stage is about to take part in a step.

        Raises:
            ValueError: on every rank, if no rank has loaded one of the pipeline's stages.
        """
        missing = [k for k in range(len(self.layout.stages)) if k not in self._loaded]
        if missing:
            raise ValueError(
                f"no rank has loaded stage {missing[0]} of {self.layout.name}; all {len(self.layout.stages)} take part"
            )
        if self._running:
            self.mail.wait_for_sends()
            self._active, self._finished, self._running = [], [], False
        self._active.append(stage)
        self.mail.open_lanes(lanes_of(self.layout), stage.stage_index_to_group_rank, self.device)

    def begin_forwards(self, microbatches: int) -> bool:
        """Called before each forward; whether it is the first of the step."""
        if self._running:
            return False
        self._running = True
        here = [stage.stage_index for stage in self._active]
        draws = [stage.draws for stage in self.layout.stages]
        self._states = states_of_forwards(draws, here, microbatches, self.device)
        return True

    def exchange_weights(self) -> None:
        """Weights that several stages read go from their owners to the others."""
        for send in (True, False):
            for stage in self._active:
                stage.exchange_weights(send)

    @contextmanager
    def random_numbers(self, stage: int, microbatch: int) -> Iterator[None]:
        """Inside, torch's generator gives what the whole model would get in this forward."""
        state = self._states.get((stage, microbatch))
        if state is None:
            yield
            return
        after = state_of(self.device)
        set_state(self.device, state)
        try:
            yield
        finally:
            set_state(self.device, after)

    def finish(self, stage: Stage) -> None:
        """A stage has no more to do in this step."""
        self._finished.append(stage)
        if len(self._finished) < len(self._active):
            return
        # Only now, since who is to read a message may wait for another stage of this rank.
        self.mail.wait_for_sends()
        for one in self._finished:
            one.complete_gradients()
