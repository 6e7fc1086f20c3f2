"""Torch's operators as functions of C: the products and convolutions that a region calls by the hundred.

torch exports them for ahead-of-time compiled programs, with a stable interface: tensors and numbers one by one, a list
as its address and its length, what may be missing as the address of it or null, and at the end where results go. Python
reads lists item by item and makes an object of each result, which takes microseconds. An operator that has other
arguments than its function in C was written for is called from Python.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.torch_version import TorchVersion

from gradsplit.compile_core.ir.loops import ExternCall, View
from gradsplit.compile_core.toolchain.torch_library import address_of

aten = torch.ops.aten

# Operator -> the function's name, and its arguments in order.
_FUNCTIONS = {
    aten.mm.out: ("mm_out", "out self mat2"),
    aten.bmm.out: ("bmm_out", "out self mat2"),
    aten.addmm.out: ("addmm_out", "out self mat1 mat2 beta alpha"),
    aten.baddbmm.out: ("baddbmm_out", "out self batch1 batch2 beta alpha"),
    aten.convolution.default: (
        "convolution",
        "input weight bias stride padding dilation transposed output_padding groups",
    ),
    aten.convolution_backward.default: (
        "convolution_backward",
        "grad_output input weight bias_sizes stride padding dilation transposed output_padding groups output_mask",
    ),
}

# Before, the functions kept an optional list's address and freed the list: sizes of no memory of theirs were read.
_TAKES_OPTIONAL_LISTS = TorchVersion(torch.__version__) >= "2.13"


class Kind(IntEnum):
    """What an argument of the function is."""

    NUMBER = 0
    TENSOR = 1
    TENSOR_ADDRESS = 2
    LIST = 3
    LIST_ADDRESS = 4


@dataclass(frozen=True)
class NativeCall:
    """A call of such a function.

    Attributes:
        address: the function's.
        arguments: a number; the name of the operator's argument that is a tensor; or a list's 64-bit words.
        doubles: the arguments that are floats, which are passed apart from the others.
    """

    address: int
    arguments: tuple[tuple[Kind, Any], ...]
    doubles: tuple[float, ...]


def native_call(call: ExternCall, device_type: str) -> NativeCall | None:
    """The call of an operator as one of C, or None where there is no such."""
    if call.target not in _FUNCTIONS or sys.platform != "linux":
        return None  # other systems pass arguments of mixed sizes in another way
    name, wanted = _FUNCTIONS[call.target]
    schema = {argument.name: argument for argument in call.target._schema.arguments}
    address = address_of(f"aoti_torch_{device_type}_{name}")
    if address is None or set(wanted.split()) != set(schema):
        return None
    given = argument_names(call)
    arguments: list[tuple[Kind, Any]] = []
    doubles: list[float] = []
    for name in wanted.split():
        value = given.get(name, schema[name].default_value)
        kind = str(schema[name].type)
        if kind == "number":
            if not isinstance(value, (int, float)):
                return None
            doubles.append(float(value))
            continue
        is_optional = kind.startswith("Optional")
        if isinstance(value, View):
            arguments.append((Kind.TENSOR_ADDRESS if is_optional else Kind.TENSOR, name))
        elif isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
            if is_optional and not _TAKES_OPTIONAL_LISTS:
                return None
            words = _words(value, is_bool=kind == "List[bool]")
            arguments.append((Kind.LIST_ADDRESS if is_optional else Kind.LIST, words))
            arguments.append((Kind.NUMBER, len(value)))
        elif value is None and is_optional:
            arguments.append((Kind.NUMBER, 0))
            if kind != "Optional[Tensor]":
                arguments.append((Kind.NUMBER, 0))
        elif isinstance(value, int) and not is_optional:
            arguments.append((Kind.NUMBER, int(value)))
        else:
            return None
    return NativeCall(address, tuple(arguments), tuple(doubles))


def argument_names(call: ExternCall) -> Mapping[str, Any]:
    """The arguments that a call gives, by name."""
    names = [argument.name for argument in call.target._schema.arguments]
    return {**dict(zip(names, call.arguments, strict=False)), **call.keywords, **call.out}


def _words(values: Sequence[Any], is_bool: bool) -> tuple[int, ...]:
    """A list in memory: integers of 64 bits, bools of 32."""
    if not is_bool:
        return tuple(map(int, values))
    pairs = [*map(int, values), 0]
    return tuple(pairs[k] | pairs[k + 1] << 32 for k in range(0, len(values), 2))
