"""Bytes to train on that every Python has: the topics of its own `help()`, about half a megabyte of English.

Batches are a pure function of their arguments, so that two runs, eager and compiled say, see equal data.
"""

import pydoc_data.topics

import torch
from torch import Tensor


def load_tokens() -> Tensor:
    """The text of all help topics, in the order of their names, as bytes: uint8 [length]."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def batch(
    tokens: Tensor,
    step: int,
    rank: int,
    world_size: int,
    batch_size: int,
    context: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one rank at one step: two int64 [batch_size, context], one byte apart.

    All ranks draw the same ``world_size * batch_size`` places in ``tokens`` and take their own slice, so
    the ranks' batches together do not depend on how many processes share them.
    """
    # Steps take seeds of their own instead of one running generator, so that any step can be had without
    # the others.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - context, (world_size * batch_size,), generator=generator)
    own_starts = starts[rank * batch_size : (rank + 1) * batch_size]
    windows = tokens[own_starts[:, None] + torch.arange(context + 1)].to(torch.int64)
    return windows[:, :-1], windows[:, 1:]
