"""Triton for single values: types, constants, memory formats, and one expression for each scalar operation.

The functions that the expressions call are ``tl``'s, libdevice's, or in ``codegen_triton_prelude.py.in``.
Division and square root of float32 are rounded as IEEE says; ``tl``'s own are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf, isnan

import torch

from gradsplit.compile_core.errors import InternalError, Unsupported
from gradsplit.compile_core.ir.loops import Apply

VALUE_TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}

# How a buffer's dtype is called in a kernel's signature. Bools are bytes in memory.
POINTER_TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "*u8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}

_NARROW_FLOATS = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip

_ANY = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "sign_of({0})",
    "square": "{0} * {0}",
    "where": "tl.where({0}, {1}, {2})",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) != ({1} != 0)",
    "logical_not": "{0} == 0",
    "isnan": "{0} != {0}",
    "bitwise_not": "~{0}",
    "maximum": "plain_max({0}, {1})",
    "minimum": "plain_min({0}, {1})",
}

_INTEGER = {
    "floor_div": "integer_floor_div({0}, {1})",
    "trunc_div": "{0} // {1}",
    "remainder": "integer_remainder({0}, {1})",
    "fmod": "{0} % {1}",
    "random_bits": "random_bits({0}, {1})",
    "random_word": "random_word({0}, {1})",
    "shift_left": "{0} << {1}",
    "shift_right": "{0} >> {1}",
    "pow": "integer_power({0}, {1})",
    "isinf": "{0} != {0}",
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "{0}"),
}

# {S} is "32" or "64".
_FLOAT = {
    "neg": "{0} * -1.0",  # Triton's own is 0 - x, which loses the sign of 0.0
    "div": "{0} / {1}",
    "maximum": "nan_max({0}, {1})",
    "minimum": "nan_min({0}, {1})",
    "floor_div": "float_floor_div({0}, {1}, {0} / {1})",
    "trunc_div": "truncated({0} / {1})",
    "remainder": "float_remainder({0}, {1})",
    "reciprocal": "1.0 / {0}",
    "rsqrt": "tl.rsqrt({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "isinf": "tl.abs({0}) == float('inf')",
    "round": "round{S}({0})",
    "trunc": "truncated({0})",
    **{
        name: f"tl.{name}({{0}})"
        for name in ("sqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf", "floor", "ceil")
    },
    **{
        name: f"libdevice.{name}({{0}})"
        for name in (
            "expm1", "log10", "log1p", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
            "atanh", "erfc", "lgamma", "tanh",
        )
    },
    **{
        name: f"libdevice.{name}({{0}}, {{1}})" for name in ("pow", "atan2", "hypot", "nextafter", "fmod", "copysign")
    },
}  # fmt: skip

_FLOAT32 = {
    "div": "tl.div_rn({0}, {1})",
    "sqrt": "tl.sqrt_rn({0})",
    "reciprocal": "tl.div_rn(tl.full((), 1.0, tl.float32), {0})",
    "floor_div": "float_floor_div({0}, {1}, tl.div_rn({0}, {1}))",
    "trunc_div": "truncated(tl.div_rn({0}, {1}))",
    "exp": "exp32({0})",
    "expm1": "expm1_32({0})",
    "tanh": "tanh32({0})",
    "log1p": "log1p32({0})",
    "log10": "tl.log({0}) * 0.43429448",
    "sigmoid": "sigmoid32({0})",
    "erf": "erf32({0})",
    "floor": "floor32({0})",
    "ceil": "ceil32({0})",
}


def value_type(dtype: torch.dtype) -> str:
    try:
        return VALUE_TYPES[dtype]
    except KeyError:
        raise Unsupported(
            "triton-value-dtype", f"Triton kernels do not compute in {dtype}", "Convert the tensor."
        ) from None


def pointer_type(dtype: torch.dtype) -> str:
    try:
        return POINTER_TYPES[dtype]
    except KeyError:
        raise Unsupported(
            "triton-buffer-dtype", f"Triton kernels do not read or write {dtype}", "Convert the tensor."
        ) from None


def loaded(element: str, memory: torch.dtype, dtype: torch.dtype) -> str:
    """The value of dtype ``dtype`` of an element loaded from a buffer of dtype ``memory``."""
    if memory in _NARROW_FLOATS:
        return converted(f"{element}.to(tl.float32)", torch.float32, dtype)
    if memory == torch.bool:
        return converted(f"({element} != 0)", torch.bool, dtype)
    return converted(element, memory, dtype)


def stored(value: str, value_dtype: torch.dtype, memory: torch.dtype) -> str:
    """What to write into a buffer of dtype ``memory``."""
    if memory in _NARROW_FLOATS:
        return f"{converted(value, value_dtype, torch.float32)}.to({_NARROW_FLOATS[memory]})"
    if memory == torch.bool:
        return f"{converted(value, value_dtype, torch.bool)}.to(tl.uint8)"
    return converted(value, value_dtype, memory)


def converted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    """A value in another dtype, as ``Tensor.to`` converts it."""
    if source == target:
        return value
    if target == torch.bool:
        return f"({value} != 0)"
    if source.is_floating_point and target in (torch.uint8, torch.int8, torch.int16):
        return f"{value}.to(tl.int64).to({value_type(target)})"
    return f"{value}.to({value_type(target)})"


def literal(value: float | bool, dtype: torch.dtype) -> str:
    """A typed constant."""
    if dtype == torch.bool:
        return f"tl.full((), {int(bool(value))}, tl.int1)"
    return f"tl.full((), {bare_literal(value, dtype)}, {value_type(dtype)})"


def bare_literal(value: float | bool, dtype: torch.dtype) -> str:
    """A Python constant for where Triton infers the type."""
    if not dtype.is_floating_point:
        return str(int(value) & 0xFF if dtype == torch.uint8 else int(value))
    number = float(value)
    if isnan(number):
        return "float('nan')"
    if isinf(number):
        return "float('inf')" if number > 0 else "-float('inf')"
    return repr(number)


def apply(statement: Apply, arguments: Sequence[str], dtypes: Sequence[torch.dtype]) -> str:
    """The expression of one operation on named values of these dtypes."""
    operation, result = statement.operation, statement.dtype
    if operation == "cast":
        return converted(arguments[0], dtypes[0], result)
    if operation == "round_to":
        if statement.parameter is None:
            raise InternalError("round_to without a target dtype")
        if (statement.parameter, dtypes[0], result) == (torch.bfloat16, torch.float32, torch.float32):
            return f"rounded_to_bfloat16({arguments[0]})"
        narrow = stored(arguments[0], dtypes[0], statement.parameter)
        return loaded(f"({narrow})", statement.parameter, result)
    computed = dtypes[-1] if operation == "where" else dtypes[0]
    if operation == "where":
        rest = (converted(a, d, result) for a, d in zip(arguments[1:], dtypes[1:], strict=True))
        arguments = (arguments[0], *rest)
    elif result.is_floating_point and not computed.is_floating_point:
        # aten promotes integers where the result is a float: sqrt, div, sigmoid ...
        arguments = [converted(a, d, result) for a, d in zip(arguments, dtypes, strict=True)]
        computed = result
    if operation in _INFIX:
        return f"({arguments[0]} {_INFIX[operation]} {arguments[1]})"
    if operation == "bitwise_not" and computed == torch.bool:
        return f"({arguments[0]} == 0)"
    if operation == "bitwise_not" and computed == torch.uint8:
        return f"({arguments[0]} ^ 255)"  # the interpreter has no ~ for unsigned integers
    expression = _template(operation, computed).format(
        *arguments, S="32" if computed == torch.float32 else "64"
    )
    return f"({expression})"


def _template(operation: str, computed: torch.dtype) -> str:
    tables: tuple[Mapping[str, str], ...] = (_INTEGER, _ANY)
    if computed.is_floating_point:
        tables = (_FLOAT32, _FLOAT, _ANY) if computed == torch.float32 else (_FLOAT, _ANY)
    for table in tables:
        if operation in table:
            return table[operation]
    raise InternalError(f"no Triton for the scalar operation {operation!r} on {computed}")
