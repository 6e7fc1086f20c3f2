"""C++ for single values: types, constants, memory formats, and one expression for each scalar operation.

The functions that the expressions call are in ``codegen_cpp_prelude.h`` or are g++'s builtins.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, isnan

import torch

from gradsplit.compile_core.ir.loops import Apply
from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS
from gradsplit.compile_core.lowering.nests.scalar_expressions import INFIX, ScalarLanguage

_VALUE_TYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float64: "double",
}

# Memory holds bools as bytes and 16-bit floats as bits.
_MEMORY_TYPES = {
    **_VALUE_TYPES,
    torch.bool: "uint8_t",
    torch.float16: "uint16_t",
    torch.bfloat16: "uint16_t",
}

_EVERY = {
    **INFIX,
    "maximum": "nan_max<{T}>({0}, {1})",
    "minimum": "nan_min<{T}>({0}, {1})",
    "neg": "-{0}",
    "abs": "absolute({0})",
    "sign": "sign_of({0})",
    "square": "{0} * {0}",
    "where": "({0} ? {1} : {2})",
    "floor_div": "floor_div<{T}>({0}, {1})",
    "trunc_div": "trunc_div<{T}>({0}, {1})",
    "remainder": "remainder_of<{T}>({0}, {1})",
    "fmod": "c_remainder<{T}>({0}, {1})",
    "logical_and": "(bool({0}) & bool({1}))",
    "logical_or": "(bool({0}) | bool({1}))",
    "logical_xor": "(bool({0}) != bool({1}))",
    "logical_not": "!bool({0})",
    "isnan": "({0} != {0})",
    "bitwise_not": "~{0}",
    "shift_left": "shift_left<{T}>({0}, {1})",
    "shift_right": "shift_right<{T}>({0}, {1})",
}

_FLOAT = {
    "div": "{0} / {1}",
    "floor_div": "floor_div({0}, {1})",
    "trunc_div": "trunc_div({0}, {1})",
    "remainder": "remainder_of({0}, {1})",
    "fmod": "c_remainder({0}, {1})",
    "reciprocal": "{T}(1) / {0}",
    "rsqrt": "{T}(1) / __builtin_sqrt{B}({0})",
    "sigmoid": "{T}(1) / ({T}(1) + __builtin_exp{B}(-{0}))",
    "isinf": "(absolute({0}) == {T}(__builtin_inf()))",
    "round": "__builtin_rint{B}({0})",
    **{
        name: f"__builtin_{name}{{B}}({{0}})"
        for name in (
            "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
            "sinh", "cosh", "tanh", "asinh", "acosh", "erf", "erfc", "lgamma", "floor", "ceil", "trunc",
        )
    },
    **{
        name: f"__builtin_{name}{{B}}({{0}}, {{1}})"
        for name in ("pow", "atan2", "copysign", "hypot", "nextafter")
    },
    **{name: f"of_any_function(__builtin_{name}{{B}}({{0}}))" for name in ("atan", "atanh")},
}  # fmt: skip

_FLOAT32 = {
    name: f"fast_{name}({{0}})"
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "tanh", "erf", "sin", "cos",
    )
}  # fmt: skip

_INTEGER = {
    "pow": "integer_power<{T}>({0}, {1})",
    "random_bits": "random_bits({0}, {1})",
    "random_word": "random_word({0}, {1})",
    "isnan": "false",
    "isinf": "false",
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "{0}"),
}

# What g++ was seen to vectorise for numbers of at most 32 bits, here by the functions of the prelude.
_VECTORISED = {
    *INFIX, *_FLOAT32.keys() - {"sin", "cos"}, "maximum", "minimum", "neg", "abs", "sign", "square", "where", "isnan",
    "isinf", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not", "div", "reciprocal", "sqrt",
    "rsqrt", "round", "floor", "ceil", "trunc", "trunc_div", "copysign", "cast", "round_to",
}  # fmt: skip

# The direct conversion of what a smaller integer type does not hold is undefined; torch's kernels go by way of these.
_TRUNCATED_TO = {torch.uint8: torch.int64, torch.int8: torch.int32, torch.int16: torch.int32}


def loaded(element: str, dtype: torch.dtype) -> str:
    """The value of a memory element."""
    match dtype:
        case torch.bool:
            return f"({element} != 0)"
        case torch.float16:
            return f"from_float16({element})"
        case torch.bfloat16:
            return f"from_bfloat16({element})"
        case _:
            return element


def stored(value: str, value_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """What to write into memory of ``dtype``."""
    match dtype:
        case torch.float16:
            return f"to_float16({converted(value, value_dtype, torch.float32)})"
        case torch.bfloat16:
            return f"to_bfloat16({converted(value, value_dtype, torch.float32)})"
        case torch.bool:
            return f"uint8_t({converted(value, value_dtype, torch.bool)})"
        case _:
            return converted(value, value_dtype, dtype)


def converted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    """A value in another dtype, as ``Tensor.to`` converts it."""
    if source == target:
        return value
    if target == torch.bool:
        return f"({value} != 0)"
    if source == torch.bool and target.is_floating_point:
        return f"({value} ? {literal(1, target)} : {literal(0, target)})"  # g++ vectorises no conversion
    if source.is_floating_point and not target.is_floating_point:
        wide = _TRUNCATED_TO.get(target, target)
        return f"{value_type(target)}(truncated<{value_type(wide)}>({value}))"
    return f"{value_type(target)}({value})"


def has_vector_form(statement: Apply, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether g++ is known to vectorise a loop with this operation on values of these dtypes in it."""
    kinds = {*dtypes, statement.dtype}
    is_narrow = torch.float64 not in kinds and not (torch.int64 in kinds and torch.float32 in kinds)
    return is_narrow and statement.operation in _VECTORISED


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        whole = int(value)
        if whole == -(2**63):
            return "(-9223372036854775807LL - 1)"
        return f"{value_type(dtype)}({whole}LL)"
    suffix = "f" if dtype == torch.float32 else ""
    number = float(value)
    if isnan(number):
        return f'__builtin_nan{suffix}("")'
    if isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    if dtype == torch.float32:
        number = float(torch.tensor(number, dtype=torch.float32).item())
        if isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_inff()"
    return f"{number.hex()}{suffix}"


def _rounded(value: str, source: torch.dtype, target: torch.dtype, result: torch.dtype) -> str:
    memory = stored(value, source, target)
    if target in HALF_FLOATS:
        return converted(loaded(memory, target), torch.float32, result)
    return converted(memory, target, result)


_LANGUAGE = ScalarLanguage(
    name="C++",
    reason="cpp",
    value_types=_VALUE_TYPES,
    memory_types=_MEMORY_TYPES,
    of_dtype={torch.float32: _FLOAT32, torch.bool: {"bitwise_not": "!{0}"}},
    floating=_FLOAT,
    integer=_INTEGER,
    every=_EVERY,
    whole="{R}({0})",
    converted=converted,
    rounded=_rounded,
)
value_type, memory_type, apply = _LANGUAGE.value_type, _LANGUAGE.memory_type, _LANGUAGE.apply
