"""C++ for single values: types, constants, memory formats, and one expression for each scalar operation.

The functions that the expressions call are in ``codegen_cpp_prelude.h`` or are g++'s builtins. Three tables
say which operation is what; an operation in none of them is a compile error, so a new one is one new line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf, isnan

import torch

from gradsplit.compile_core.errors import InternalError, Unsupported
from gradsplit.compile_core.ir.loops import Apply, Constant

VALUE_TYPES: Mapping[torch.dtype, str] = {
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
MEMORY_TYPES: Mapping[torch.dtype, str] = {
    **VALUE_TYPES,
    torch.bool: "uint8_t",
    torch.float16: "uint16_t",
    torch.bfloat16: "uint16_t",
}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip

# Templates for every dtype; {0}, {1}, {2} are arguments, {T} is the result's type.
_ANY = {
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

# Templates for floats; {B} is the suffix of g++'s builtins: "f" for float32, "" for float64.
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
        for name in [
            "sqrt",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "acosh",
            "atanh",
            "erf",
            "erfc",
            "lgamma",
            "floor",
            "ceil",
            "trunc",
        ]
    },
    **{
        name: f"__builtin_{name}{{B}}({{0}}, {{1}})"
        for name in ("pow", "atan2", "copysign", "hypot", "nextafter")
    },
}

_FLOAT32 = {
    name: f"fast_{name}({{0}})"
    for name in [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sigmoid",
        "tanh",
        "erf",
        "sin",
        "cos",
    ]
}

_INTEGER = {
    "pow": "integer_power<{T}>({0}, {1})",
    "random_bits": "random_bits({0}, {1})",
    "random_word": "random_word({0}, {1})",
    "isnan": "false",
    "isinf": "false",
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "{0}"),
}

# The direct conversion of what a narrow type does not hold is undefined; torch's kernels go by way of these.
_TRUNCATED_TO = {torch.uint8: torch.int64, torch.int8: torch.int32, torch.int16: torch.int32}


def value_type(dtype: torch.dtype) -> str:
    try:
        return VALUE_TYPES[dtype]
    except KeyError:
        raise Unsupported(
            "cpp-value-dtype", f"C++ kernels do not compute in {dtype}", "Convert the tensor to a real dtype."
        ) from None


def memory_type(dtype: torch.dtype) -> str:
    try:
        return MEMORY_TYPES[dtype]
    except KeyError:
        raise Unsupported(
            "cpp-buffer-dtype", f"C++ kernels do not read or write {dtype}", "Convert the tensor."
        ) from None


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


def constant(statement: Constant) -> str:
    return literal(statement.value, statement.dtype)


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


def apply(statement: Apply, arguments: Sequence[str], dtypes: Sequence[torch.dtype]) -> str:
    """The expression of one operation on named values of these dtypes."""
    operation, result = statement.operation, statement.dtype
    if operation == "cast":
        return converted(arguments[0], dtypes[0], result)
    if operation == "round_to":
        return _rounded(arguments[0], dtypes[0], statement)
    computed = dtypes[-1] if operation == "where" else dtypes[0]
    if operation == "where":
        arguments = (
            arguments[0],
            *(converted(a, d, result) for a, d in zip(arguments[1:], dtypes[1:], strict=True)),
        )
    elif result.is_floating_point and not computed.is_floating_point:
        # aten promotes integers where the result is a float: sqrt, div, sigmoid ...
        arguments = [converted(a, d, result) for a, d in zip(arguments, dtypes, strict=True)]
        computed = result
    if operation in _INFIX:
        return f"{value_type(result)}({arguments[0]} {_INFIX[operation]} {arguments[1]})"
    if operation == "bitwise_not" and computed == torch.bool:
        return f"!{arguments[0]}"
    template = _template(operation, computed)
    names = {"T": value_type(computed), "B": "f" if computed == torch.float32 else ""}
    return f"{value_type(result)}({template.format(*arguments, **names)})"


def _template(operation: str, computed: torch.dtype) -> str:
    tables: tuple[Mapping[str, str], ...] = (_ANY,)
    if computed == torch.float32:
        tables = (_FLOAT32, _FLOAT, _ANY)
    elif computed.is_floating_point:
        tables = (_FLOAT, _ANY)
    else:
        tables = (_INTEGER, _ANY)
    for table in tables:
        if operation in table:
            return table[operation]
    raise InternalError(f"no C++ for the scalar operation {operation!r} on {computed}")


def _rounded(value: str, dtype: torch.dtype, statement: Apply) -> str:
    target = statement.parameter
    if target is None:
        raise InternalError("round_to without a target dtype")
    memory = stored(value, dtype, target)
    if target in (torch.float16, torch.bfloat16):
        return converted(loaded(memory, target), torch.float32, statement.dtype)
    return converted(memory, target, statement.dtype)
