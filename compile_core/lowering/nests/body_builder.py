"""Building the straight-line body of a loop nest.

Every statement is interned, so equal loads and operations appear once; operations on constants are folded;
the few algebraic identities that hold bit for bit are applied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.ir.loops import Access, Apply, Constant, Load, Position, Reduce, Statement, Store
from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS, compute_dtype

_LOOP_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    }
)  # fmt: skip

_COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
}  # fmt: skip
_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "logical_not": operator.not_,
    "square": lambda x: x * x,
}
_COMMUTATIVE = frozenset(
    {
        "add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor",
        "bitwise_and", "bitwise_or", "bitwise_xor",
    }
)  # fmt: skip

# Of powers of two that a float32 has with their inverses.
_LARGEST_EXPONENT = 126


def is_loop_dtype(dtype: torch.dtype) -> bool:
    """Whether bodies can compute with elements of ``dtype``."""
    return dtype in _LOOP_DTYPES


def _has_exact_inverse(divisor: float) -> bool:
    """Whether a quotient is, bit for bit, the product with the inverse, as of a power of two: both round alike."""
    fraction, exponent = math.frexp(divisor)
    return abs(fraction) == 0.5 and abs(exponent) < _LARGEST_EXPONENT


def value_dtype(statement: Statement) -> torch.dtype:
    """The dtype of the value that a statement defines; a store defines none."""
    if isinstance(statement, Store):
        raise TypeError("a store defines no value")
    return statement.dtype


class BodyBuilder:
    """Appends statements; every method returns the number of the value that holds the result.

    Args:
        extents: the iteration space, reduced axes last.
        buffer_dtype: dtype of a buffer by name.
    """

    def __init__(self, extents: Sequence[int], buffer_dtype: Callable[[str], torch.dtype]) -> None:
        self.extents = tuple(extents)
        self.buffer_dtype = buffer_dtype
        self.statements: list[Statement] = []
        self._interned: dict[Any, int] = {}

    def add(self, statement: Statement) -> int:
        """Interns a statement as it is, without folding."""
        key: Any = statement
        if isinstance(statement, Constant):  # 0.0 == -0.0 == False, and nan != nan
            key = (Constant, repr(statement.value), statement.dtype)
        elif isinstance(statement, Load):
            key = (statement, repr(statement.other))
        elif isinstance(statement, Store):
            key = (statement, len(self.statements))
        found = self._interned.get(key)
        if found is None:
            found = self._interned[key] = len(self.statements)
            self.statements.append(statement)
        return found

    def dtype_of(self, value: int) -> torch.dtype:
        return value_dtype(self.statements[value])

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> int:
        dtype = compute_dtype(dtype)
        if dtype == torch.bool:
            value = bool(value)
        elif dtype.is_floating_point:
            value = float(value)
            if dtype == torch.float32 and math.isfinite(value):
                value = torch.tensor(value, dtype=torch.float32).item()
        else:
            limits = torch.iinfo(dtype)
            value = (int(value) - limits.min) % (limits.max - limits.min + 1) + limits.min  # as tensors wrap
        return self.add(Constant(value, dtype))

    def load(self, access: Access, mask: int | None = None, other: float | int | bool = 0) -> int:
        dtype = compute_dtype(self.buffer_dtype(access.buffer))
        if mask is not None:
            known = self.constant_of(mask)
            if known is not None:
                return self.load(access) if known else self.constant(other, dtype)
        return self.add(Load(access, dtype, mask, other if mask is not None else 0))

    def point(self, strides: Sequence[int], offset: int = 0) -> int:
        """``offset + sum(axis * stride)`` as a value."""
        moving = tuple(s if n != 1 else 0 for s, n in zip(strides, self.extents, strict=True))
        return self.add(Position(moving, offset)) if any(moving) else self.constant(offset, torch.int64)

    def reduce(self, operation: str, argument: int, dtype: torch.dtype) -> int:
        return self.add(Reduce(operation, argument, dtype))

    def store(
        self, access: Access, value: int, mask: int | None = None, reduction: str | None = None
    ) -> None:
        self.add(Store(access, value, mask, reduction))

    def constant_of(self, value: int) -> float | int | bool | None:
        statement = self.statements[value]
        return statement.value if isinstance(statement, Constant) else None

    def cast(self, value: int, dtype: torch.dtype) -> int:
        """The value in the compute dtype of ``dtype``; no rounding to a 16-bit float."""
        dtype = compute_dtype(dtype)
        if self.dtype_of(value) == dtype:
            return value
        if dtype == torch.bool:
            return self.apply("ne", (value, self.constant(0, self.dtype_of(value))), torch.bool)
        known = self.constant_of(value)
        holds_it = dtype.is_floating_point or not self.dtype_of(value).is_floating_point
        if known is not None and math.isfinite(known) and (holds_it or abs(known) < 2**31):
            return self.constant(known, dtype)
        return self.add(Apply("cast", (value,), dtype))

    def round_to(self, value: int, dtype: torch.dtype) -> int:
        """The value as an element of ``dtype`` would hold it."""
        value = self.cast(value, dtype)
        if dtype not in HALF_FLOATS:
            return value
        statement = self.statements[value]
        if isinstance(statement, Load) and self.buffer_dtype(statement.access.buffer) == dtype:
            return value
        if (
            isinstance(statement, Apply)
            and statement.operation == "round_to"
            and statement.parameter == dtype
        ):
            return value
        if isinstance(statement, Constant):
            return self.constant(torch.tensor(statement.value, dtype=dtype).item(), torch.float32)
        if self._condition(value) is not None:
            return value
        if isinstance(statement, Apply) and statement.operation == "where":
            chosen = statement.arguments[1:]
            if all(self.constant_of(choice) is not None for choice in chosen):
                rounded = (self.round_to(choice, dtype) for choice in chosen)
                return self.apply("where", (statement.arguments[0], *rounded), torch.float32)
        return self.add(Apply("round_to", (value,), torch.float32, dtype))

    def _condition(self, value: int) -> int | None:
        """The bool that a value is 1 for, and else 0, if it is the number of one."""
        statement = self.statements[value]
        if isinstance(statement, Apply) and statement.operation == "cast":
            (condition,) = statement.arguments
            return condition if self.dtype_of(condition) == torch.bool else None
        return None

    def apply(
        self,
        operation: str,
        arguments: Sequence[int],
        dtype: torch.dtype,
        parameter: torch.dtype | None = None,
    ) -> int:
        if operation == "cast":
            return self.cast(arguments[0], dtype)
        if operation == "round_to" and parameter is not None:
            return self.round_to(arguments[0], parameter)
        folded = self._fold(operation, tuple(arguments), dtype)
        if folded is not None:
            return folded
        if operation in _COMMUTATIVE:
            arguments = sorted(arguments)
        return self.add(Apply(operation, tuple(arguments), dtype, parameter))

    def _fold(self, operation: str, arguments: tuple[int, ...], dtype: torch.dtype) -> int | None:
        known = [self.constant_of(argument) for argument in arguments]
        if operation == "where":
            if known[0] is not None:
                return arguments[1] if known[0] else arguments[2]
            return arguments[1] if arguments[1] == arguments[2] else None
        if operation in ("logical_and", "logical_or"):
            for this, other in ((0, 1), (1, 0)):
                if known[this] is not None:
                    absorbs = bool(known[this]) == (operation == "logical_or")
                    return arguments[this] if absorbs else arguments[other]
            return None
        if operation in ("mul", "div") and known[1] == 1 and self.dtype_of(arguments[0]) == dtype:
            return arguments[0]
        if operation == "mul" and known[0] == 1 and self.dtype_of(arguments[1]) == dtype:
            return arguments[1]
        if operation == "sub" and known[1] == 0 and self.dtype_of(arguments[0]) == dtype:
            return arguments[0] if not dtype.is_floating_point or math.copysign(1, known[1]) > 0 else None
        if operation == "add" and not dtype.is_floating_point:
            for this, other in ((0, 1), (1, 0)):
                if known[this] == 0:
                    return arguments[other]
        if (
            operation == "div"
            and dtype.is_floating_point
            and known[1]
            and all(self.dtype_of(argument) == dtype for argument in arguments)
        ):
            condition = self._condition(arguments[0])
            if condition is not None:  # of a dropout: a quotient is many times what a choice is
                # A float64's quotient, rounded to float32, is that of float32.
                quotients = (self.constant(number / known[1], dtype) for number in (1.0, 0.0))
                return self.apply("where", (condition, *quotients), dtype)
            if _has_exact_inverse(known[1]):
                return self.apply("mul", (arguments[0], self.constant(1.0 / known[1], dtype)), dtype)
        if any(value is None for value in known):
            return None
        function = _COMPARISONS.get(operation) or _ARITHMETIC.get(operation) or _UNARY.get(operation)
        if function is None or (operation in _ARITHMETIC and dtype == torch.bool):
            return None
        result = function(*known)
        return self.constant(result, dtype)
