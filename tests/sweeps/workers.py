"""The processes of a sweep: each measures some models, one after another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any

from tests.sweeps.cases import case_named
from tests.sweeps.measure import Result, Setting, measure

# What a library keeps of each model adds up.
_MODELS_OF_A_PROCESS = 25

Task = tuple[str, Setting, int]


def run_all(tasks: Sequence[Task], workers: int) -> Iterator[dict[str, Any]]:
    """The results as dictionaries, as they come. A task has a model's name, a setting and the seconds it may take."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(tasks), size := _MODELS_OF_A_PROCESS * workers):
        # New processes for each share: the executor's own way to replace them hangs in Python 3.11.
        with ProcessPoolExecutor(workers, context) as pool:
            for future in as_completed(
                [pool.submit(_measured, task) for task in tasks[first : first + size]]
            ):
                yield future.result()


def _measured(task: Task) -> dict[str, Any]:
    name, setting, limit = task
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(limit)
    try:
        return asdict(measure(case_named(name), setting))
    except TimeoutError as error:
        return asdict(Result(name, skipped=str(error)))
    finally:
        signal.alarm(0)


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError("takes longer than the limit of the sweep")
