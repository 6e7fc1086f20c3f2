"""A failing graph made smaller: ranks and passes first, then calls, sizes and inputs, each change tried in a fork.

A process that uses a GPU cannot be forked, so programs on GPUs are tried in this one: errors and wrong values are made
smaller, and a crash or a hang ends the search.

What counts as the same failure is ``outcome.Outcome.is_like``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.minimizer.outcome import Outcome
from gradsplit.compile_core.minimizer.reduce import fewer_calls, needed_passes, smaller_sizes, with_examples
from gradsplit.compile_core.minimizer.repro_inputs import draw
from gradsplit.compile_core.minimizer.subgraph import Candidate, values_of
from gradsplit.compile_core.minimizer.trials import in_a_fork
from gradsplit.compile_core.minimizer.write_repro import Settings, write_repro

# A graph that computes nothing for so long waits for itself.
_IDLE_LIMIT_S = 5.0

# Tries a graph with these settings, in this process.
Try = Callable[[Candidate, Settings], Outcome]


@dataclass(frozen=True)
class Minimized:
    """What was found.

    Attributes:
        outcome: what the graph fails with, small as it is.
        path: of the program; ``None`` if the graph did not fail.
        passes: the passes without which it fails no more, or fails otherwise.
        seconds, trials: what it took.
    """

    outcome: Outcome
    path: Path | None
    candidate: Candidate
    settings: Settings
    passes: tuple[str, ...]
    seconds: float
    trials: int

    def __str__(self) -> str:
        if self.path is None:
            return f"the graph does not fail here: {self.outcome}"
        needed = f"; only with the passes {', '.join(self.passes)}" if self.passes else ""
        return (
            f"{len(self.candidate.calls)} calls that fail in the same way ({self.outcome}){needed}: {self.path} "
            f"({self.trials} trials, {self.seconds:.0f} s)"
        )


def minimize(
    candidate: Candidate,
    settings: Settings,
    attempt: Try,
    folder: Path,
    pass_names: Sequence[str] = (),
    limit_s: float = 60.0,
    says: Callable[[str], None] = lambda line: None,
) -> Minimized:
    """Makes the graph smaller and writes the smallest into a folder.

    Args:
        attempt: runs in a fork of this process.
        pass_names: of those that may be left out of a compilation.
        limit_s: how long one trial may take; what takes longer hangs.
        says: called with each line of progress.
    """
    begin, trials = time.monotonic(), 0

    def tried(candidate: Candidate, settings: Settings) -> Outcome:
        nonlocal trials
        trials += 1
        if torch.cuda.is_initialized():  # which does not outlive a fork
            return attempt(candidate, settings)
        return in_a_fork(lambda: attempt(candidate, settings), limit_s, _IDLE_LIMIT_S)

    failure = tried(candidate, settings)
    says(f"{len(candidate.calls)} calls: {failure}")
    if failure.is_failure and settings.ranks > 1:
        of_one = tried(candidate, replace(settings, ranks=1))
        if of_one.is_like(replace(failure, rank=None)):
            failure, settings = of_one, replace(settings, ranks=1)
            says("fails on one rank alone")
    passes: tuple[str, ...] = ()
    path = None
    if failure.is_failure:
        if failure.kind == "hangs":
            limit_s = min(limit_s, 20.0)

        def fails(tried_candidate: Candidate, tried_settings: Settings) -> bool:
            return tried(tried_candidate, tried_settings).is_like(failure)

        passes = tuple(
            needed_passes(
                pass_names,
                lambda names: fails(candidate, replace(settings, skipped_passes=tuple(sorted(names)))),
            )
        )
        skipped = [name for name in pass_names if name not in passes]
        settings = replace(settings, skipped_passes=tuple(skipped))
        says(
            f"fails without {len(skipped)} of {len(pass_names)} passes, and needs {', '.join(passes) or 'none'}"
        )
        candidate = fewer_calls(candidate, values_of(candidate), lambda other: fails(other, settings))
        says(f"{len(candidate.calls)} calls")
        is_drawn = False
        if candidate.again is None:  # else it is what distinguishes the two calls' inputs
            candidate = smaller_sizes(candidate, lambda other: fails(other, settings))
            drawn = with_examples(replace(candidate, inputs=_drawn(candidate.inputs)))
            is_drawn = fails(drawn, settings)
            candidate = drawn if is_drawn else candidate
        failure = tried(candidate, settings)
        path = write_repro(
            folder, candidate.module, candidate.inputs, settings, str(failure), is_drawn, candidate.again
        )
    return Minimized(failure, path, candidate, settings, passes, time.monotonic() - begin, trials)


def _drawn(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        draw(k, value.shape, value.stride(), value.dtype, str(value.device), value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for k, value in enumerate(inputs)
    )
