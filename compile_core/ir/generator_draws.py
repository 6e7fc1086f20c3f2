"""Draws from a ``torch.Generator`` of the program, as functions of tensors.

A generator is an object that operators change. In a graph its state stands for it, which is a tensor: a draw takes one
and gives the next one. So draws come in the program's order because of what they read, move nothing where the graph
raises, and may be computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def with_generator(
    name: str, device: str, state: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Call a function with a generator of ``device`` that is in ``state``.

    Args:
        name: ``"torch.randn"``, a function; ``"Tensor.normal_"``, a method in place, called on a new tensor with the
            layout of the one that is given; or ``"Generator.manual_seed"``, a method by which a generator gets a state,
            whatever its own was.

    Returns:
        The state of the generator afterwards, and what the function returns, if it draws.
    """
    owner, _, method = name.partition(".")
    # Fake tensors draw nothing, and the forms of functions that take no generator keep open sizes.
    generator = None if isinstance(state, FakeTensor) else torch.Generator(device)
    if generator is not None and owner == "Generator":
        return (getattr(generator, method)(*args).get_state(),)
    chosen = {} if generator is None else {"generator": generator.set_state(state)}
    drawn: tuple[torch.Tensor, ...] = ()
    if owner == "torch":
        drawn = (getattr(torch, method)(*args, **kwargs, **chosen),)
    elif owner == "Tensor":
        like, *rest = args
        new = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        drawn = (getattr(new, method)(*rest, **kwargs, **chosen),)
    return (torch.empty_like(state) if generator is None else generator.get_state(), *drawn)
