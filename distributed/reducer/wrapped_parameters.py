"""Which parameters stock DDP reduces: those that required gradients when the module was wrapped.

A program may freeze others later, and thaw them, as the two modules of a GAN are in turn. Torch looks at what requires
gradients now wherever it makes a reducer, and does not note what it found; but the reducer knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsplit.distributed.ddp_module import Names, parameter_names

# What is known of a reducer that was released.
_REMEMBERED = "_gradsplit_reduced_parameters"


def reduced_parameters(
    ddp: DistributedDataParallel, names: Names | None = None
) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients the module reduces, by name.

    Args:
        names: of parameters that the module had earlier. It may have others in their places now, as ``functional_call``
            puts them there for a call.
    """
    reduced = set(_of_reducer(ddp))
    names = {**(names or {}), **parameter_names(ddp)}
    return {name: parameter for parameter, name in names.items() if parameter in reduced}


def remember_parameters(ddp: DistributedDataParallel) -> None:
    """The module is about to lose its reducer."""
    vars(ddp)[_REMEMBERED] = _of_reducer(ddp)


def forget_parameters(attributes: dict[str, Any]) -> None:
    """The module that has these attributes has a reducer again, or will have one."""
    attributes.pop(_REMEMBERED, None)


@contextmanager
def as_wrapped(ddp: DistributedDataParallel) -> Iterator[None]:
    """While this lasts, those of the module's parameters require gradients that did when it was wrapped."""
    reduced = set(_of_reducer(ddp))
    changed = [p for p in ddp.module.parameters() if p.requires_grad != (p in reduced)]
    _toggle(changed)
    try:
        yield
    finally:
        _toggle(changed)


def _of_reducer(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    remembered = vars(ddp).get(_REMEMBERED)
    if remembered is not None:
        return remembered
    try:
        # For its answer it makes zeros as large as all gradients.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:
        # It cannot where any gradient is sparse. What requires gradients now is the next best.
        return ddp._build_params_for_reducer()[0]
    return [tensor for bucket in buckets for tensor in bucket.parameters()]


def _toggle(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def looks_for_unused(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer looks for unused parameters in every forward.

    Of a static graph it does not, even if asked to: those of the first backward stay unused.
    """
    return ddp.find_unused_parameters and not ddp.static_graph
