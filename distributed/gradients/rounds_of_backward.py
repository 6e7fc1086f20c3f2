"""The rounds that began in one backward: of several modules, as a rule, which have no parameter in common.

Two compiled forms of one module have buckets of their own. A backward that reaches both would leave the sums of one as
gradients, so that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from compile_core.errors import CompileError

# By whoever reduces: its parameters, and the number of the backward in which its last round began. No other has it.
_latest: weakref.WeakKeyDictionary[object, tuple[Mapping[str, torch.nn.Parameter], int]] = (
    weakref.WeakKeyDictionary()
)


def note_round(owner: object, parameters: Mapping[str, torch.nn.Parameter], backward: int) -> None:
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
