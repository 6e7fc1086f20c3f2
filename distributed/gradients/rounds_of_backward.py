"""The rounds that began in one backward: of several modules, as a rule, which have no parameter in common.

They end with the backward. One that raises calls none of the engine's callbacks, so it is noticed where it was started.

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

from compile_core.errors import CompileError
from distributed.gradients.running_backward import backward_number


class RoundOwner(Protocol):
    """Reduces gradients in rounds."""

    def break_off(self) -> None:
        """Its round, if there is one, does not come to its end."""
        ...


# By whoever reduces: its parameters, and the number of the backward in which its last round began. No other has it.
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
    _latest[owner] = parameters, backward
