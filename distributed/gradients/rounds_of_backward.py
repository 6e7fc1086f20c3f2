"""The rounds that began in one backward: of several modules, as a rule, which have no parameter in common.

They end with the backward. One that raises calls none of the engine's callbacks, so it is noticed where it was started.

Of ranks that run other branches one may have all gradients of a bucket in the midst of a backward, and another only at
its end. So that modules over one process group start their collectives in the same order on all ranks, a round starts
none before those that began earlier have started all of theirs.

Two compiled forms of one module have buckets of their own. A backward that reaches both would leave the sums of one as
gradients, so that is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.torch_facts.autograd_engine import current_graph_task_id


class Owner(Protocol):
    """Makes rounds."""

    def break_off(self) -> None:
        """Its round, if there is one, does not come to its end."""
        ...


class RunningRound(Protocol):
    """Reduces the gradients of some parameters over a group; ``backward`` is the engine's number of its backward."""

    parameters: Mapping[str, torch.nn.Parameter]
    group: dist.ProcessGroup
    backward: int

    @property
    def has_to_start(self) -> bool:
        """Whether there are buckets that are not started yet."""
        ...


# Those that run, in the order in which they began.
_running: weakref.WeakKeyDictionary[Owner, RunningRound] = weakref.WeakKeyDictionary()
# By thread, as far as they run: not those that reentrant checkpoints run inside of another.
_backwards: set[int] = set()


@contextmanager
def rounds_end_here() -> Iterator[None]:
    """A backward runs; if it raises, so do its rounds.

    Where another thread runs one, it is not known whose rounds they are: those are left to the next forwards.
    """
    if current_graph_task_id() != -1:
        yield
        return
    thread = threading.get_ident()
    _backwards.add(thread)
    try:
        yield
    except BaseException:
        if len(_backwards) == 1:
            for owner in [*_running]:
                owner.break_off()
        raise
    finally:
        _backwards.discard(thread)


def round_begins(owner: Owner, begun: RunningRound) -> None:
    """
    Raises:
        CompileError: a round of another owner with some of the parameters runs in this backward.
    """
    for other in [*_running.values()]:
        if other.backward == begun.backward:
            shared = {*other.parameters.values()}
            for name, parameter in begun.parameters.items():
                if parameter in shared:
                    raise CompileError(
                        f"{name!r} is in two compiled forms of DistributedDataParallel modules that one backward "
                        f"reaches, and each would reduce a part of its gradient: compile the module once, or call "
                        f"backward() for each form, or pass DDPOptions(overlap='reducer')"
                    )
    _running[owner] = begun


def round_ended(owner: Owner) -> None:
    """Its round has come to its end, or broke off."""
    _running.pop(owner, None)


def is_next(mine: RunningRound) -> bool:
    """Whether the buckets of this round may be started."""
    if len(_running) < 2:
        return True
    for other in [*_running.values()]:
        if other is mine:
            return True
        if other.backward == mine.backward and other.group is mine.group and other.has_to_start:
            return False
    return True
