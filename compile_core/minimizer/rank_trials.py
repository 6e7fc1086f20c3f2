"""A trial on several ranks of one group, which may disagree or wait for each other for ever."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from gradsplit.compile_core.minimizer.outcome import Outcome, raised
from gradsplit.compile_core.minimizer.trials import crashed


def on_ranks(run: Callable[[], Outcome], ranks: int) -> Outcome:
    """What ``run`` returns on the ranks of a gloo group, each a fork of this process.

    A rank that fails leaves, as it would in a program; others wait for all. So this hangs where a rank does.

    Returns:
        "equal" if it is so on all; else the failure that came first, which says its rank: others may fail since that
        rank has left.
    """
    waiting, end = os.pipe()
    with tempfile.TemporaryDirectory() as folder:

        def work(rank: int) -> Outcome:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            store = Path(folder, "store").as_uri()
            dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
            return run()

        started = [_started(lambda rank=rank: work(rank), waiting, end) for rank in range(ranks)]
        os.close(waiting)
        answers = []
        for _, reading in started:
            with os.fdopen(reading) as pipe:
                answers.append(pipe.read())
        os.close(end)
        statuses = [os.waitpid(child, 0)[1] for child, _ in started]
    failures = []
    for rank, (answer, status) in enumerate(zip(answers, statuses, strict=True)):
        when, outcome = json.loads(answer) if answer else (0.0, asdict(crashed(status)))
        if Outcome(**outcome).is_failure:
            failures.append((when, rank, Outcome(**outcome)))
    if not failures:
        return Outcome(**json.loads(answers[0])[1])
    _, rank, failure = min(failures, key=lambda found: found[:2])
    return replace(failure, rank=rank, text=f"on rank {rank} {failure.text}")


def _started(work: Callable[[], Outcome], waiting: int, end: int) -> tuple[int, int]:
    """Forks a rank; its process, and what its outcome is read from, with when that was known."""
    reading, writing = os.pipe()
    child = os.fork()
    if child > 0:
        os.close(writing)
        return child, reading
    with suppress(BaseException):  # which leaves no answer
        os.close(reading)
        os.close(end)
        try:
            outcome = work()
        except Exception as error:
            outcome = raised(error)
        with os.fdopen(writing, "w") as pipe:
            json.dump([time.monotonic(), asdict(outcome)], pipe)
        if not outcome.is_failure:
            os.read(waiting, 1)
    os._exit(0)  # exit handlers are the parent's
