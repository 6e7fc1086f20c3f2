"""Triton for single values: types, constants, memory formats, and one expression for each scalar operation.

The functions that the expressions call are ``tl``'s, libdevice's, or in ``codegen_triton_prelude.py.in``.
Division and square root of float32 are rounded as IEEE says; ``tl``'s own are not.
"""

from __future__ import annotations

from math import isinf, isnan

import torch

from gradsplit.compile_core.lowering.nests.scalar_expressions import INFIX, ScalarLanguage

_VALUE_TYPES = {
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
_POINTER_TYPES = {
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

_HALF_FLOATS = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}

_EVERY = {
    **INFIX,
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
    "exp2": "exp2_32({0})",
    "rsqrt": "rsqrt32({0})",
    "expm1": "expm1_32({0})",
    "tanh": "tanh32({0})",
    "log1p": "log1p32({0})",
    "log10": "tl.log({0}) * 0.43429448",
    "sigmoid": "sigmoid32({0})",
    "erf": "erf32({0})",
    "floor": "floor32({0})",
    "ceil": "ceil32({0})",
}


def loaded(element: str, memory: torch.dtype, dtype: torch.dtype) -> str:
    """The value of dtype ``dtype`` of an element loaded from a buffer of dtype ``memory``."""
    if memory in _HALF_FLOATS:
        return converted(f"{element}.to(tl.float32)", torch.float32, dtype)
    if memory == torch.bool:
        return converted(f"({element} != 0)", torch.bool, dtype)
    return converted(element, memory, dtype)


def stored(value: str, value_dtype: torch.dtype, memory: torch.dtype) -> str:
    """What to write into a buffer of dtype ``memory``."""
    if memory in _HALF_FLOATS:
        return f"{converted(value, value_dtype, torch.float32)}.to({_HALF_FLOATS[memory]})"
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


def _rounded(value: str, source: torch.dtype, target: torch.dtype, result: torch.dtype) -> str:
    if (target, source, result) == (torch.bfloat16, torch.float32, torch.float32):
        return f"rounded_to_bfloat16({value})"
    return loaded(f"({stored(value, source, target)})", target, result)


_LANGUAGE = ScalarLanguage(
    name="Triton",
    reason="triton",
    value_types=_VALUE_TYPES,
    memory_types=_POINTER_TYPES,
    of_dtype={
        torch.float32: _FLOAT32,
        torch.bool: {"bitwise_not": "{0} == 0"},
        torch.uint8: {"bitwise_not": "{0} ^ 255"},  # the interpreter has no ~ for unsigned integers
    },
    floating=_FLOAT,
    integer=_INTEGER,
    every=_EVERY,
    whole="({0})",
    converted=converted,
    rounded=_rounded,
)
value_type, pointer_type, apply = _LANGUAGE.value_type, _LANGUAGE.memory_type, _LANGUAGE.apply
