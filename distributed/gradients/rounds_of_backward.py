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
from gradsplit.distributed.gradients.running_backward import backward_number


class RoundOwner(Protocol):
    """Reduces gradients in rounds."""

    group: dist.ProcessGroup

    @property
    def has_to_start(self) -> bool:
        """Whether there is a round with buckets that are not started yet."""
        ...

    def break_off(self) -> None:
        """Its round, if there is one, does not come to its end."""
        ...


# By whoever reduces: its parameters, and the number of the backward in which its last round began, which no other has.
# Those of rounds that began later come later.
_latest: weakref.WeakKeyDictionary[RoundOwner, tuple[Mapping[str, torch.nn.Parameter], int]] = (
    weakref.WeakKeyDictionary()
)
# By thread, as far as they run: not those that reentrant checkpoints run inside of another.
_backwards: set[int] = set()


@contextmanager
def rounds_end_here() -> Iterator[None]:
    """A backward runs; if it raises, so do its rounds.

    Where another thread runs one, it is not known whose rounds they are: those are left to the next forwards.
    """
    if backward_number() != -1:
        yield
        return
    thread = threading.get_ident()
    _backwards.add(thread)
    try:
        yield
    except BaseException:
        if len(_backwards) == 1:
            for owner in [*_latest]:
                owner.break_off()
        raise
    finally:
        _backwards.discard(thread)


def note_round(owner: RoundOwner, parameters: Mapping[str, torch.nn.Parameter], backward: int) -> None:
    """A round begins.

    Args:
        owner: whose round it is.
        parameters: whose gradients it reduces, by name.
        backward: the number of the backward.

    Raises:
        CompileError: a round of another owner with some of the parameters has begun in this backward.
    """
    for other, (theirs, number) in [*_latest.items()]:
        if number == backward and other is not owner:
            shared = {*theirs.values()}
            for name, parameter in parameters.items():
                if parameter in shared:
                    raise CompileError(
                        f"{name!r} is in two compiled forms of DistributedDataParallel modules that one backward "
                        f"reaches, and each would reduce a part of its gradient: compile the module once, or call "
                        f"backward() for each form, or pass DDPOptions(overlap='reducer')"
                    )
    _latest.pop(owner, None)
    _latest[owner] = parameters, backward


def is_next(owner: RoundOwner) -> bool:
    """Whether the buckets of this round may be started."""
    if len(_latest) < 2:
        return True
    backward = _latest[owner][1]
    for other, (_, number) in _latest.items():
        if other is owner:
            return True
        if number == backward and other.group is owner.group and other.has_to_start:
            return False
    return True
