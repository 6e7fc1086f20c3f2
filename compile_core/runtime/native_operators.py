"""Torch's operators as functions of C: the products and convolutions that a region calls by the hundred.

torch exports them for ahead-of-time compiled programs, with a stable interface: tensors and numbers one by one, a list
as its address and its length, what may be missing as the address of it or null, and at the end where results go. Python
reads lists item by item and makes an object of each result, which takes microseconds. An operator that has other
arguments than its function in C was written for is called from Python.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.torch_version import TorchVersion

from gradsplit.compile_core.ir.loops import ExternCall, View
from gradsplit.compile_core.toolchain.torch_library import address_of, dtype_number

aten = torch.ops.aten

# Operator -> the function's name, and its arguments in order.
_FUNCTIONS = {
    aten.mm.out: ("mm_out", "out self mat2"),
    aten.mm.dtype_out: ("mm_dtype_out", "out self mat2 out_dtype"),
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


class Kind(IntEnum):
    """What an argument of a function is, and so its type in C++: ``argument`` of ``region_interpreter.cpp``."""

    INTEGER = 0
    BOOL = 1
    DOUBLE = 2
    TENSOR = 3
    OPTIONAL_TENSOR = 4
    INTEGERS = 5
    OPTIONAL_INTEGERS = 6
    BOOLS = 7
    DTYPE = 8
    RESULT = 9


# The type of an operator's argument -> the function's arguments for it. After a list comes its length.
_KINDS = {
    "int": (Kind.INTEGER,),
    "ScalarType": (Kind.DTYPE,),
    "bool": (Kind.BOOL,),
    "number": (Kind.DOUBLE,),
    "Tensor": (Kind.TENSOR,),
    "Optional[Tensor]": (Kind.OPTIONAL_TENSOR,),
    "List[int]": (Kind.INTEGERS, Kind.INTEGER),
    "Optional[List[int]]": (Kind.OPTIONAL_INTEGERS, Kind.INTEGER),
    "List[bool]": (Kind.BOOLS, Kind.INTEGER),
}
_LISTS = {Kind.INTEGERS, Kind.BOOLS}
# Before, the functions kept an optional list's address and freed the list: sizes of no memory of theirs were read.
if TorchVersion(torch.__version__) >= "2.13":
    _LISTS.add(Kind.OPTIONAL_INTEGERS)
# The words for what is missing.
_NOTHING = {Kind.OPTIONAL_TENSOR: (-1,), Kind.OPTIONAL_INTEGERS: (0, 0)}


def _kinds_of(operator: Any, wanted: str) -> tuple[tuple[Kind, ...], ...]:
    """What the function takes for each argument, and last where results go; nothing if the operator is another one."""
    types = {argument.name: _type_of(argument) for argument in operator._schema.arguments}
    if types.keys() != set(wanted.split()) or not _KINDS.keys() >= set(types.values()):
        return ()
    has_out = any(argument.is_out for argument in operator._schema.arguments)
    results = 0 if has_out else len(operator._schema.returns)
    return (*(_KINDS[types[name]] for name in wanted.split()), (Kind.RESULT,) * results)


def _type_of(argument: Any) -> str:
    """A dtype is an integer to a schema's reader, as an open size is."""
    return "ScalarType" if str(argument.real_type) == "ScalarType" else str(argument.type)


# The types of functions' arguments. The interpreter has a typed call for each.
SIGNATURES = tuple(
    dict.fromkeys(
        tuple(chain(*kinds))
        for operator, (_, wanted) in _FUNCTIONS.items()
        if (kinds := _kinds_of(operator, wanted))
    )
)


@dataclass(frozen=True)
class NativeCall:
    """A call of such a function.

    Attributes:
        address: the function's.
        signature: which of ``SIGNATURES`` is its.
        arguments: for each a number; the name of the operator's argument that is a tensor; or a list's 64-bit words.
    """

    address: int
    signature: int
    arguments: tuple[int | str | tuple[int, ...], ...]


def native_call(call: ExternCall, device_type: str) -> NativeCall | None:
    """The call of an operator as one of C, or None where there is no such."""
    if call.target not in _FUNCTIONS:
        return None
    name, wanted = _FUNCTIONS[call.target]
    address = address_of(f"aoti_torch_{device_type}_{name}")
    kinds = _kinds_of(call.target, wanted)
    if address is None or not kinds:
        return None
    defaults = {argument.name: argument.default_value for argument in call.target._schema.arguments}
    given = {**defaults, **argument_names(call)}
    if call.target is aten.convolution_backward.default and not given["output_mask"][2]:
        given["bias_sizes"] = None  # they are read for its gradient only
    arguments: list[int | str | tuple[int, ...]] = []
    for name, (kind, *_) in zip(wanted.split(), kinds[:-1], strict=True):
        value = given[name]
        if value is None and kind in _NOTHING:
            arguments += _NOTHING[kind]
        elif isinstance(value, View) and kind in (Kind.TENSOR, Kind.OPTIONAL_TENSOR):
            arguments.append(name)
        elif isinstance(value, (int, float)) and kind is Kind.DOUBLE:
            arguments += struct.unpack("q", struct.pack("d", value))
        elif isinstance(value, torch.dtype) and kind is Kind.DTYPE:
            arguments.append(dtype_number(value))
        elif isinstance(value, int) and kind in (Kind.INTEGER, Kind.BOOL):
            arguments.append(int(value))
        elif _is_list(value) and kind in _LISTS:
            arguments += (_words(value, kind is Kind.BOOLS), len(value))
        else:
            return None
    arguments += range(len(kinds[-1]))
    return NativeCall(address, SIGNATURES.index(tuple(chain(*kinds))), tuple(arguments))


def _is_list(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value)


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
