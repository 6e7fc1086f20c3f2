"""A step of the pipeline on one rank: what its stages do together.

Sizes, torch's generator, the messages and the end of the step belong to the rank. Where sizes may differ between steps
they are not known before the first forward, which is given the arguments of the call; what was to be received before
that is asked for then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradsplit.distributed.pipeline.agree_on_sizes import Shape, SizeAgreement
from gradsplit.distributed.pipeline.call_arguments import read_call
from gradsplit.distributed.pipeline.draws import set_state, state_of, states_of_forwards
from gradsplit.distributed.pipeline.layout import PipelineLayout
from gradsplit.distributed.pipeline.mail import Mail


class Stage(Protocol):
    """What a step asks of a stage."""

    stage_index: int
    stage_index_to_group_rank: dict[int, int]

    def take_sizes(self) -> None: ...
    def start_receiving(self, microbatch: int) -> None: ...
    def exchange_weights(self, send: bool) -> None: ...
    def complete_gradients(self) -> None: ...


class RankStep:
    """The steps of one rank's stages of one pipeline.

    Args:
        name: which the group's ranks have for it.
        layout: of the pipeline.
        device: of its stages.
        group: of its ranks.
        has_tags: see ``Mail``.

    Attributes:
        shapes: of the call's arguments, of a microbatch of this step.
        layout: for these shapes.
        has_sizes: whether they are known yet.
    """

    def __init__(
        self,
        name: str,
        layout: PipelineLayout,
        device: torch.device,
        group: dist.ProcessGroup | None,
        has_tags: bool,
    ) -> None:
        self.name = name
        self.shapes: tuple[Shape, ...] = layout.example_shapes
        self.layout, self.device = layout.at(self.shapes), device
        self.mail = Mail(group, len(layout.stages), has_tags)
        self._exported = layout
        self._agreement = SizeAgreement(layout, group) if layout.open_arguments else None
        self.has_sizes = self._agreement is None
        # Microbatches that were to be received before.
        self._postponed: list[tuple[Stage, int]] = []
        self._loaded: set[int] = set()
        self._active: list[Stage] = []
        self._finished: list[Stage] = []
        self._running = False
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def note_loaded(self, stages: Iterable[int], term: str) -> None:
        """Ranks of the group have loaded these.

        Args:
            term: a name that they agreed on; see ``SizeAgreement``.
        """
        self._loaded.update(stages)
        if self._agreement is not None:
            self._agreement.begin_term(term)

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
        # A step may have ended with an error before its first forward.
        if self._running or stage in self._active:
            self.mail.wait_for_sends()
            self._active, self._finished, self._running = [], [], False
            self.has_sizes = self._agreement is None
            self._postponed.clear()
        self._active.append(stage)
        self.mail.open_lanes(self.layout, stage.stage_index_to_group_rank, self.device)

    def postpone(self, stage: Stage, microbatch: int) -> None:
        """A stage is to receive a microbatch whose size is not known yet."""
        self._postponed.append((stage, microbatch))

    def begin_forwards(self, microbatches: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Called before each forward, with the arguments of its microbatch; whether it is the first of the step.

        Raises:
            ValueError: on all ranks, if sizes do not fit; nothing is sent by then.
        """
        if self._running:
            return False
        self._running = True
        if self._agreement is not None:
            self._settle_sizes(self._agreement, args, kwargs)
        here = [stage.stage_index for stage in self._active]
        draws = [stage.draws for stage in self.layout.stages]
        self._states = states_of_forwards(draws, here, microbatches, self.device)
        return True

    def _settle_sizes(self, agreement: SizeAgreement, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        seen: dict[int, Shape] = {}
        problem = ""
        try:
            seen = {k: tuple(given.shape) for k, given in read_call(self._exported, args, kwargs).items()}
        except ValueError as error:
            problem = str(error)
        shapes = agreement.agree(seen, problem)
        if shapes != self.shapes:
            self.shapes, self.layout = shapes, self._exported.at(shapes)
        for stage in self._active:
            stage.take_sizes()
        self.has_sizes = True
        for stage, microbatch in self._postponed:
            stage.start_receiving(microbatch)

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
