"""The processes of a sweep: one for each model and compiler, so that none finds what another left in memory.

They are forked from a process that has imported the libraries, where the device can be used after a fork; else each
imports them anew. Each sees one card and its share of the cores: compilers start as many processes as they may use. A
process that takes longer than the limit is killed, wherever it is stuck.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from tests.sweeps.cases import case_named
from tests.sweeps.measure import OURS, TORCHS, Result, Setting, measure

# Read when a library is loaded; the second lets torch ask for GPUs without starting CUDA, after which none could fork.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_PRELOAD = "tests.sweeps.preload"
# After the end of a sweep a process may take so long to finish.
_GRACE_S = 30.0

Share = TypeVar("Share")
Task = tuple[str, str]
"""A model's name and a compiler."""
Work = Callable[[Result, Setting, Callable[[Result], None]], None]
"""Fills in a result, which it tells as often as it knows more."""


@dataclass(frozen=True)
class Resources:
    """What a sweep may use.

    Attributes:
        cards: the GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; processes are spread over them. None: as they are.
        limit_s: what one process may take.
        end: of the monotonic clock; nothing starts after it, and what runs half a minute later is not recorded.
    """

    workers: int
    cards: Sequence[str]
    limit_s: float
    end: float


@dataclass
class _Running:
    process: Any
    answers: Connection
    card: str
    cores: frozenset[int]
    folder: str
    started: float
    result: Result


def run_all(
    tasks: Sequence[Task], setting: Setting, resources: Resources, work: Work | None = None
) -> Iterator[dict[str, Any]]:
    """The results as dictionaries, as they come. Where ours of a model is among the tasks, the other compiler's waits
    for it, and is left out where the model does not run; those come first whose ours is not one graph."""
    os.environ.update(_ENVIRONMENT)
    context = _context(setting.device)
    with_ours = {name for name, compiler in tasks if compiler == OURS}
    waiting = deque(task for task in tasks if task[1] == OURS or task[0] not in with_ours)
    later = set(tasks) - set(waiting)
    running: list[_Running] = []
    cores = sorted(os.sched_getaffinity(0))
    count = min(resources.workers, len(cores))
    places = [frozenset(cores[place::count]) for place in range(count)]
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < resources.workers and now < resources.end:
                card = least_used([one.card for one in running], resources.cards or [""])
                place = least_used([one.cores for one in running], places)
                result = Result(*waiting.popleft())
                running.append(_started(context, work or measure_named, result, setting, card, place))
            if not running or now > resources.end + _GRACE_S:
                return
            wait([one.process.sentinel for one in running], 1.0)
            for one in [one for one in running if _has_ended(one, resources.limit_s)]:
                running.remove(one)
                _stop(one)
                if (beside := (one.result.name, TORCHS)) in later and not one.result.skipped:
                    later.remove(beside)
                    # Where ours is one graph, torch's cannot be fewer, and waits for all of ours.
                    (waiting.append if one.result.graphs == 1 else waiting.appendleft)(beside)
                yield asdict(one.result) | {"wall_s": round(time.monotonic() - one.started, 1)}
    finally:
        for one in running:
            _stop(one)


def least_used(used: Sequence[Share], shares: Sequence[Share]) -> Share:
    """The card, or the cores, with the fewest processes, the first of equals."""
    return min(shares, key=used.count)


def _context(device: str) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    probe = context.Process(target=_probe, args=(device,))
    probe.start()
    probe.join()
    if probe.exitcode == 0:
        return context
    print(f"{device} cannot be used after a fork: each process imports the libraries anew", file=sys.stderr)
    return multiprocessing.get_context("spawn")


def _probe(device: str) -> None:
    import torch

    torch.ones(2, device=device).sum().item()


def _started(
    context: Any, work: Work, result: Result, setting: Setting, card: str, cores: frozenset[int]
) -> _Running:
    folder = tempfile.mkdtemp(prefix="sweep")
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(work, result, setting, card, cores, folder, theirs))
    process.start()
    theirs.close()
    return _Running(process, mine, card, cores, folder, time.monotonic(), result)


def _has_ended(one: _Running, limit_s: float) -> bool:
    """Takes what a process tells, and whether there will be no more."""
    is_alive = one.process.is_alive()
    with suppress(EOFError, OSError):
        while one.answers.poll():
            one.result = one.answers.recv()
    if is_alive and time.monotonic() - one.started <= limit_s:
        return False
    if is_alive:
        _fail(one.result, f"takes longer than {limit_s:.0f} s")
    elif one.process.exitcode != 0:
        log = Path(one.folder, "log")
        said = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        _fail(one.result, f"its process ended with {one.process.exitcode}: {''.join(said)[:200]}")
    return True


def _fail(result: Result, why: str) -> None:
    if result.stage == "made":
        result.skipped = why
    elif result.stage == "compared":  # what was compiled has run
        result.worst = why
    else:
        result.error = f"{why} (while it was {result.stage})"


def _stop(one: _Running) -> None:
    pid = one.process.pid
    for kill in (partial(os.killpg, pid, signal.SIGKILL), partial(os.kill, pid, signal.SIGKILL)):
        with suppress(ProcessLookupError):  # it is so new that it has no group yet, or has ended
            kill()
            break
    one.process.join()
    one.answers.close()
    shutil.rmtree(one.folder, ignore_errors=True)


def _child(
    work: Work,
    result: Result,
    setting: Setting,
    card: str | None,
    cores: frozenset[int],
    folder: str,
    answers: Connection,
) -> None:
    os.setsid()
    os.sched_setaffinity(0, cores)
    log = os.open(Path(folder, "log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if card:
        os.environ["CUDA_VISIBLE_DEVICES"] = card
    os.environ["GRADSPLIT_CACHE"] = f"{folder}/gradsplit"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    warnings.simplefilter("ignore")
    importlib.import_module(_PRELOAD)
    work(result, setting, answers.send)


def measure_named(result: Result, setting: Setting, tell: Callable[[Result], None]) -> None:
    measure(case_named(result.name), result.compiler, setting, tell)
