"""A nest for each scalar operation and each kind of dtype it is defined for, with awkward operands."""

from __future__ import annotations

import torch

from gradsplit.compile_core.ir.loops import SCALAR_OPERATIONS
from tests.lowering.codegen_nests import BOOL, F32, F64, I64, Case, NestBuilder

I32 = torch.int32
COUNT = 200

_FLOAT_ONLY = {
    "div", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    "sigmoid", "lgamma", "atan2", "copysign", "hypot", "nextafter",
}  # fmt: skip
_INTEGER_ONLY = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"}
_BOOL_TOO = {
    "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "eq", "ne",
}  # fmt: skip
PREDICATES = {
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_xor", "logical_not",
}  # fmt: skip
_INT64_ONLY = {"random_bits", "random_word"}
_DIVISIONS = {"floor_div", "trunc_div", "remainder", "fmod"}


def _dtypes(operation: str) -> list[torch.dtype]:
    if operation in _INT64_ONLY:
        return [I64]
    dtypes = [] if operation in _INTEGER_ONLY else [F32, F64]
    if operation not in _FLOAT_ONLY:
        dtypes += [I32, I64]
    if operation in _BOOL_TOO:
        dtypes.append(BOOL)
    return dtypes


def operation_case(operation: str, dtype: torch.dtype) -> Case:
    b = NestBuilder((COUNT,))
    arguments = []
    for k in range(SCALAR_OPERATIONS[operation]):
        kind = BOOL if operation == "where" and k == 0 else dtype
        b.buffer(f"x{k}", (COUNT,), kind)
        arguments.append(b.load(f"x{k}", (0,)))
    predicate = operation in PREDICATES
    value = b.apply(
        operation, *arguments, dtype=I32 if operation == "random_word" else BOOL if predicate else dtype
    )
    b.buffer("y", (COUNT,), b.dtype(value))
    b.store("y", (0,), value)
    return b.nest(f"{operation}_{str(dtype)[6:]}"), b.buffers


def operands_for(operation: str, case: Case) -> dict[str, torch.Tensor]:
    """Operands with zeros, both signs, NaN and infinities; small shift counts; no integer division by
    zero."""
    generator = torch.Generator().manual_seed(1)
    storages = {}
    for name, spec in case[1].items():
        if spec.dtype == BOOL:
            storages[name] = torch.randint(0, 2, (COUNT,), generator=generator).bool()
        elif spec.dtype.is_floating_point:
            values = torch.randn(COUNT, generator=generator, dtype=F64) * 3
            special = torch.tensor(
                [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 0.5, -2.5, 1e-30]
            )
            values[torch.randperm(COUNT, generator=generator)[:60]] = special.double().repeat(6)
            storages[name] = values.to(spec.dtype)
        else:
            values = torch.randint(-9, 10, (COUNT,), generator=generator)
            if name == "x1" and operation in _DIVISIONS:
                values = torch.where(values == 0, 3, values)
            if operation.startswith("shift"):
                values = values.abs()
            if operation in _INT64_ONLY:
                values[::2] = torch.randint(-(2**63), 2**63 - 1, (COUNT // 2,), generator=generator)
            storages[name] = values.to(spec.dtype)
    return storages


OPERATIONS: dict[str, tuple[str, Case]] = {
    f"{operation}_{str(dtype)[6:]}": (operation, operation_case(operation, dtype))
    for operation in SCALAR_OPERATIONS
    if operation not in ("cast", "round_to")
    for dtype in _dtypes(operation)
}
