"""Where torch's objects keep what native code reads of them: found by a search in a few tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from gradsplit.compile_core.torch_facts.dispatcher import dispatch_keys, efficient_zeros
from gradsplit.compile_core.torch_facts.private_parts import probed


@probed(
    "offset of the tensor in its Python object",
    "native code that reads tensors",
    "guards and regions run as generated Python",
)
@cache
def tensor_offset() -> int:
    """Where in a Python object torch keeps its tensor, which is a pointer.

    Raises:
        LookupError: it is not found.
    """
    with torch.inference_mode(False):
        plain = torch.zeros(2, 3, device="cpu")
        tensors = (plain, plain[1], torch.empty(2, device="meta"), torch.nn.Parameter(plain))
    return _find_offset(range(16, 48, 8), [id(tensor) for tensor in tensors], [t._cdata for t in tensors])


@probed(
    "offset of the dispatch keys in a tensor",
    "native code that checks guards on tensors",
    "guards are checked by generated Python",
)
@cache
def dispatch_keys_offset() -> tuple[int, int, int, int]:
    """Where a tensor keeps its dispatch keys; the keys of conjugated and negated tensors, and of those without memory.

    Raises:
        LookupError: it is not found.
    """
    with torch.inference_mode(False):
        plain = torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
        conjugated, negated = plain.conj(), plain.conj().imag
        zeros = efficient_zeros((2, 3), dtype=torch.complex64, device="cpu")
        others = (torch.empty(2, device="meta"), torch.nn.Parameter(plain))
        tensors = (plain, conjugated, negated, zeros, *others)
    keys = [dispatch_keys(tensor).raw_repr() for tensor in tensors]
    offset = _find_offset(range(16, 184, 8), [tensor._cdata for tensor in tensors], keys)
    conj, neg, zero = (own & ~keys[0] for own in keys[1:4])
    return offset, conj, neg, zero


def _find_offset(offsets: range, addresses: Sequence[int], values: Sequence[int]) -> int:
    """The first offset at which every address holds its value."""
    for offset in offsets:
        if all(word_at(address, offset) == value for address, value in zip(addresses, values, strict=True)):
            return offset
    raise LookupError("torch lays out its tensors in an unknown way")


def word_at(address: int, offset: int) -> int:
    """The 64 bits there."""
    return ctypes.c_uint64.from_address(address + offset).value
