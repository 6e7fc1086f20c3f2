"""The C++ of reductions: how an accumulator starts, takes a value, takes another accumulator, and ends.

A reduction lives in variables of a fixed meaning, named after its statement ``n``:

- ``r{n}`` accumulates a block of points: a scalar when the reduced axis is vectorised (g++ then keeps a
  vector of partial results), an array over columns when a parallel axis is.
- ``t{n}`` accumulates blocks. For sums and products of float32 it is a double, so that the error is that of
  one block, some tens of values one after the other, however long the reduction. A scalar ``r{n}`` whose loop
  g++ does not vectorise would be hundreds: it is a double as well.
- ``q{n}`` accompanies ``r{n}``: for a scalar maximum or minimum of floats it says whether a NaN came by (one
  plain vector maximum and one comparison, instead of a chain of selects), for argmax and argmin it is the
  position.
- ``v{n}`` is the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsplit.compile_core.ir.loops import Reduce
from gradsplit.compile_core.lowering.cpp_kernels.scalar_cpp import value_type

_POSITIONAL = ("argmax", "argmin")


@dataclass(frozen=True)
class CppReduction:
    """One ``Reduce`` statement.

    Attributes:
        number: the statement's.
        statement: itself.
        computed: dtype of the values that are compared or added.
        by_column: whether accumulators are arrays over the vectorised parallel axis.
        one_by_one: whether accumulators are scalars that may take the values of a block one by one.
    """

    number: int
    statement: Reduce
    computed: torch.dtype
    by_column: bool
    one_by_one: bool

    @property
    def is_positional(self) -> bool:
        return self.statement.operation in _POSITIONAL

    @property
    def has_flag(self) -> bool:
        extremum = self.statement.operation in ("max", "min")
        return extremum and self.computed.is_floating_point and not self.by_column

    @property
    def block_type(self) -> str:
        if self.one_by_one and self._loses_digits:
            return "double"
        # g++ does not vectorise |= and &= on bool
        return "int" if self.statement.operation in ("any", "all") else value_type(self.computed)

    @property
    def total_type(self) -> str:
        return "double" if self._loses_digits else self.block_type

    @property
    def _loses_digits(self) -> bool:
        return self.statement.operation in ("sum", "prod") and self.computed == torch.float32

    @property
    def second_type(self) -> str:
        """The type of ``q`` and ``u``; empty when there is no such variable."""
        return "int64_t" if self.is_positional else "int" if self.has_flag else ""

    @property
    def identity(self) -> str:
        operation, computed = self.statement.operation, self.computed
        match operation:
            case "sum" | "any":
                return "0"
            case "prod" | "all":
                return "1"
        largest = operation in ("min", "argmin")
        if computed.is_floating_point:
            return "__builtin_inf()" if largest else "-__builtin_inf()"
        if computed == torch.bool:
            return "true" if largest else "false"
        limits = torch.iinfo(computed)
        if largest:
            return f"{value_type(computed)}({limits.max}LL)"
        return f"{value_type(computed)}({limits.min + 1}LL - 1)"

    def step(self, value: str, at: str, position: str) -> str:
        """Takes one value; ``at`` is ``""`` or the column's subscript, ``position`` the index along the
        axis."""
        r, q = f"r{self.number}{at}", f"q{self.number}{at}"
        if self.is_positional:
            displaces = f"displaces_{self.statement.operation[3:]}({r}, {value})"
            return f"if ({displaces}) {{ {r} = {value}; {q} = {position}; }}"
        if self.has_flag:
            sign = ">" if self.statement.operation == "max" else "<"
            return f"{r} = {value} {sign} {r} ? {value} : {r}; {q} |= int({value} != {value});"
        return self._combined(r, value)

    def simd_clauses(self) -> str:
        """What ``#pragma omp simd`` must know of a scalar accumulator."""
        n = self.number
        symbol = {"sum": "+", "prod": "*", "any": "|", "all": "&"}.get(
            self.statement.operation, self.statement.operation
        )
        flag = f" reduction(|: q{n})" if self.has_flag else ""
        return f" reduction({symbol}: r{n}){flag}"

    def declare(self, prefix: str, columns: int) -> list[str]:
        """Declares the block's (``"r"``) or the total's (``"t"``) variables and lets them start."""
        n = self.number
        kind = self.block_type if prefix == "r" else self.total_type
        second = {"r": "q", "t": "u"}[prefix]
        if not self.by_column:
            lines = [f"{kind} {prefix}{n} = {self.identity};"]
            if self.second_type:
                lines.append(f"{self.second_type} {second}{n} = 0;")
            return lines
        start = f"{prefix}{n}[c] = {self.identity};"
        lines = [f"alignas(64) {kind} {prefix}{n}[{columns}];"]
        if self.is_positional:
            lines.append(f"alignas(64) int64_t {second}{n}[{columns}];")
            start += f" {second}{n}[c] = 0;"
        return [*lines, f"for (int64_t c = 0; c < {columns}; ++c) {{ {start} }}"]

    def flush(self, source: str, source_second: str, at: str) -> str:
        """Adds a block (or another total) to the total."""
        n = self.number
        total = f"t{n}{at}"
        if self.is_positional:
            second = f"u{n}{at}"
            better = f"displaces_{self.statement.operation[3:]}({total}, {source})"
            return f"if ({better}) {{ {total} = {source}; {second} = {source_second}; }}"
        flag = f" u{n} |= {source_second};" if self.has_flag else ""
        return self._combined(total, source) + flag

    def result(self, at: str) -> str:
        """The finished value."""
        n = self.number
        if self.is_positional:
            return f"u{n}{at}"
        if self.has_flag:
            kind = value_type(self.computed)
            return f'{value_type(self.statement.dtype)}(u{n} ? {kind}(__builtin_nan("")) : t{n})'
        return f"{value_type(self.statement.dtype)}(t{n}{at})"

    def _combined(self, target: str, value: str) -> str:
        match self.statement.operation:
            case "sum":
                return f"{target} += {value};"
            case "prod":
                return f"{target} *= {value};"
            case "any":
                return f"{target} |= {value};"
            case "all":
                return f"{target} &= {value};"
            case "max":
                return f"{target} = nan_max({target}, {value});"
            case _:
                return f"{target} = nan_min({target}, {value});"
