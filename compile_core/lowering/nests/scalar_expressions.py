"""One expression for each scalar operation, in the language of a kind of kernels.

A language is tables: what its types are called, and a template for each operation by the dtype in which it computes.
An operation that is in none of them is a compile error, so a new one is one new line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.errors import InternalError, Unsupported
from gradsplit.compile_core.ir.loops import Apply

# The operations that C++ and Triton write alike.
INFIX = {
    name: f"{{0}} {sign} {{1}}"
    for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"),
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="),
        ("bitwise_and", "&"), ("bitwise_or", "|"), ("bitwise_xor", "^"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class ScalarLanguage:
    """How one language writes values.

    Templates have ``{0}``, ``{1}``, ``{2}`` for the arguments, ``{T}`` for the type in which is computed, ``{B}`` for
    the suffix of g++'s builtins ("f" for float32, else nothing), ``{S}`` for the bits of a float ("32" or "64").

    Attributes:
        name: for messages; ``reason`` begins the ids of reasons.
        value_types: the types of values, ``memory_types`` those of elements in memory.
        of_dtype, floating, integer, every: templates; those of a dtype come first, then those of its kind.
        whole: what makes one operand of an expression: of ``{R}``, the result's type, and ``{0}``.
        converted: ``(value, source, target)`` to the value in another dtype, as ``Tensor.to`` converts it.
        rounded: ``(value, source, target, result)`` to the value as a store in ``target`` and a load would leave it.
    """

    name: str
    reason: str
    value_types: Mapping[torch.dtype, str]
    memory_types: Mapping[torch.dtype, str]
    of_dtype: Mapping[torch.dtype, Mapping[str, str]]
    floating: Mapping[str, str]
    integer: Mapping[str, str]
    every: Mapping[str, str]
    whole: str
    converted: Callable[[str, torch.dtype, torch.dtype], str]
    rounded: Callable[[str, torch.dtype, torch.dtype, torch.dtype], str]

    def value_type(self, dtype: torch.dtype) -> str:
        return self._type(self.value_types, dtype, "value", "compute in")

    def memory_type(self, dtype: torch.dtype) -> str:
        return self._type(self.memory_types, dtype, "buffer", "read or write")

    def _type(self, types: Mapping[torch.dtype, str], dtype: torch.dtype, what: str, do: str) -> str:
        if dtype not in types:
            explanation = f"{self.name} kernels do not {do} {dtype}"
            raise Unsupported(
                f"{self.reason}-{what}-dtype", explanation, "Convert the tensor to a real dtype."
            )
        return types[dtype]

    def apply(self, statement: Apply, arguments: Sequence[str], dtypes: Sequence[torch.dtype]) -> str:
        """The expression of one operation on named values of these dtypes."""
        operation, result = statement.operation, statement.dtype
        if operation == "cast":
            return self.converted(arguments[0], dtypes[0], result)
        if operation == "round_to":
            if statement.parameter is None:
                raise InternalError("round_to without a target dtype")
            return self.rounded(arguments[0], dtypes[0], statement.parameter, result)
        computed = dtypes[-1] if operation == "where" else dtypes[0]
        first = 1 if operation == "where" else 0
        # aten promotes integers where the result is a float: sqrt, div, sigmoid ...
        promotes = result.is_floating_point and not computed.is_floating_point
        if first or promotes:
            values = zip(arguments[first:], dtypes[first:], strict=True)
            arguments = [
                *arguments[:first],
                *(self.converted(value, dtype, result) for value, dtype in values),
            ]
            computed = computed if first else result
        expression = self._template(operation, computed).format(
            *arguments,
            T=self.value_type(computed),
            B="f" if computed == torch.float32 else "",
            S="32" if computed == torch.float32 else "64",
        )
        return self.whole.format(expression, R=self.value_type(result))

    def _template(self, operation: str, computed: torch.dtype) -> str:
        kind = self.floating if computed.is_floating_point else self.integer
        for table in (self.of_dtype.get(computed, {}), kind, self.every):
            if operation in table:
                return table[operation]
        raise InternalError(f"no {self.name} for the scalar operation {operation!r} on {computed}")
