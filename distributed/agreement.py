"""Ranks agree on one thing before their first collective depends on it.

Every rank posts what it decided to the process group's store and reads what the others posted. A store is used, not a
collective, because a rank that does not come must be named after a time limit instead of hanging everyone, and because
a rank may still be compiling when the others are done.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from compile_core.errors import CompileError

_rounds: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class Decision:
    """What one rank means to do with a module.

    Attributes:
        plan: the printed bucket plan of the in-graph way, or "" for another way.
        reason: why not the in-graph way, or "".
        error: the error that ended this rank's compilation, or "".
    """

    plan: str = ""
    reason: str = ""
    error: str = ""


def agree(decision: Decision, group: dist.ProcessGroup, timeout_s: float) -> list[Decision]:
    """All ranks' decisions, in group order.

    Rounds of one group are numbered, so every rank must call this the same number of times.

    Raises:
        CompileError: a rank did not decide in time, or its compilation failed; the message names it.
    """
    ranks = dist.get_process_group_ranks(group)
    members = ",".join(map(str, ranks))
    prefix = f"gradsplit/{members}/{next(_rounds[members])}"
    store = _get_default_store()
    store.set(f"{prefix}/{dist.get_rank()}", json.dumps(asdict(decision)))
    keys = {rank: f"{prefix}/{rank}" for rank in ranks}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise CompileError(
            f"rank {_listed(missing)} did not agree on a gradient plan within {timeout_s:g} s: it may have "
            f"failed, or not called the compiled module, or be slow to compile (then raise agreement_timeout_s)"
        ) from error
    decisions = {rank: Decision(**json.loads(store.get(key))) for rank, key in keys.items()}
    failed = [rank for rank, other in decisions.items() if other.error]
    if failed and dist.get_rank() not in failed:
        raise CompileError(f"compilation failed on rank {_listed(failed)}: {decisions[failed[0]].error}")
    return list(decisions.values())


def check_same_plan(decisions: list[Decision], group: dist.ProcessGroup) -> None:
    """Ensures that every rank will reduce the same buckets.

    Raises:
        CompileError: the plans differ; the message names a rank and the first line that differs.
    """
    ranks = dist.get_process_group_ranks(group)
    first = decisions[0].plan.splitlines()
    for rank, other in zip(ranks, decisions, strict=True):
        lines = other.plan.splitlines()
        if lines != first:
            pairs = itertools.zip_longest(first, lines, fillvalue="(nothing)")
            mine, theirs = next((a.strip(), b.strip()) for a, b in pairs if a != b)
            raise CompileError(
                f"rank {rank} planned other gradient buckets than rank {ranks[0]}: {theirs!r} where rank {ranks[0]} "
                f"has {mine!r}; the ranks must run the same model"
            )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
