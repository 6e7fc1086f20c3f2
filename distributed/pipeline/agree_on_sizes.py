"""Ranks agree on the sizes of a step where these may differ between steps, before anything of it is sent.

A rank sees the arguments of the call that it is given, and most ranks need sizes of others: of buffers for what they
receive, of what other stages draw. So each tells the others, in the process group's store, the shapes that it sees, or
what is wrong with them, at its first forward of a step. From there on all know the same, and raise the same error where
something does not fit. No device waits for that, and in training no rank: a pipeline is empty between two steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from gradsplit.compile_core.torch_facts.process_groups import store_of
from gradsplit.distributed.agreement.agreement import agreement_of
from gradsplit.distributed.pipeline.layout import PipelineLayout

# As long as gloo waits for a message; and how often who waits looks for it, and whether another rank has failed.
_PATIENCE_S = 30 * 60.0
_PAUSES_S = (0.0001, 0.01)

Shape = tuple[int, ...]


class SizeAgreement:
    """The steps of a pipeline's ranks.

    Args:
        layout: of the pipeline.
        group: of its ranks.
    """

    def __init__(self, layout: PipelineLayout, group: dist.ProcessGroup | None) -> None:
        self._layout, self._open = layout, layout.open_arguments
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)
        whole = group or dist.group.WORLD
        # Of its own, since who asks a store keeps others from it.
        self._store = store_of(whole).clone()
        self._watch = agreement_of(whole).watch  # type: ignore[arg-type]
        self._term, self._step = "", 0

    def begin_term(self, term: str) -> None:
        """Ranks have met in a collective, and number steps anew from here on.

        Args:
            term: a name that was never used before.
        """
        self._term, self._step = term, 0

    def agree(self, seen: Mapping[int, Shape], problem: str) -> tuple[Shape, ...]:
        """The shapes of all arguments in this step.

        Args:
            seen: those that this rank was given, by position.
            problem: what is wrong with them, or "".

        Raises:
            ValueError: on all ranks, if anything does not fit.
            CompileError: a rank has failed.
            RuntimeError: one did not come.
        """
        self._step += 1
        mine = {"shapes": {str(position): shape for position, shape in seen.items()}, "problem": problem}
        self._store.set(self._name(self._step, self._rank), json.dumps(mine))
        found = list(map(json.loads, self._read_all()))
        # All have begun this step, so nobody reads of the one before.
        if self._step > 1:
            self._store.delete_key(self._name(self._step - 1, self._rank))
        problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(found) if one["problem"]]
        if problems:
            raise ValueError(problems[0])
        return self._merged([{int(k): tuple(v) for k, v in one["shapes"].items()} for one in found])

    def _merged(self, found: Sequence[Mapping[int, Shape]]) -> tuple[Shape, ...]:
        layout = self._layout
        first: dict[int, tuple[int, Shape]] = {}
        for rank, shapes in enumerate(found):
            for position, shape in shapes.items():
                other, known = first.setdefault(position, (rank, shape))
                if shape != known:
                    raise ValueError(
                        f"{layout.arguments[position].place} has the shape {list(known)} on rank {other} and "
                        f"{list(shape)} on rank {rank}, in a microbatch; give step() the same batch on all ranks"
                    )
        for position in self._open:
            if position not in first:
                raise ValueError(
                    f"no rank was given {layout.arguments[position].place}, whose sizes differ between steps; give it "
                    f"to step() on one rank at least, such as that of the stage that reads it"
                )
        shapes = [first[k][1] if k in first else shape for k, shape in enumerate(layout.example_shapes)]
        broken = layout.broken_condition(shapes)
        if broken:
            given = ", ".join(f"{layout.arguments[k].place} {list(shapes[k])}" for k in self._open)
            raise ValueError(
                f"{layout.name} was exported for sizes with {broken}; a microbatch of this step has {given}. Give "
                f"other sizes, or export it again with other dynamic_shapes"
            )
        return tuple(shapes)

    def _read_all(self) -> list[bytes]:
        """What the ranks have told in this step, in their order, once all of them have."""
        names = [self._name(self._step, rank) for rank in range(self._count)]
        began_s, (pause_s, longest_s) = time.monotonic(), _PAUSES_S
        while not self._store.check(names):
            self._watch.check_failures()
            if time.monotonic() > began_s + _PATIENCE_S:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                raise RuntimeError(
                    f"rank {', '.join(map(str, missing))} has not begun its step {self._step} of {self._layout.name} "
                    f"within {_PATIENCE_S:g} s; all ranks of a pipeline call step() equally often"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return list(map(self._store.get, names))

    def _name(self, step: int, rank: int) -> str:
        return f"gradsplit-pipeline/{self._term}/{step}/{rank}"
