"""The random numbers of a call that fails are given back to the CPU's generator.

The call is then made again as plain Python, which draws them itself: the generator would move twice. Under hooks for
saved tensors, where no call is made again, the draws stay. Limit: what a GPU's generator gave stays drawn; its kernels
fail after the program has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradsplit.compile_core.torch_facts.torch_switches import saved_tensor_hooks_are_active


@contextmanager
def draws_returned_on_error() -> Iterator[None]:
    """Where the block raises, the generator is as it was before."""
    generator = torch.default_generator
    state = generator.get_state()
    try:
        yield
    except Exception:
        if not saved_tensor_hooks_are_active():
            generator.set_state(state)
        raise
