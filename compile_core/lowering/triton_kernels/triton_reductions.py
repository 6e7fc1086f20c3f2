"""Reductions of a tile in Triton: what they accumulate while a kernel walks blocks, and what is left in the end.

A kernel that holds rows as a whole reduces a tile at once. One that walks them keeps a tile of partial results, each
place of which combines the elements that came there, and reduces that after the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsplit.compile_core.ir.loops import Reduce
from gradsplit.compile_core.lowering.triton_kernels import scalar_triton
from gradsplit.compile_core.lowering.triton_kernels.triton_sides import Side


@dataclass(frozen=True)
class TileReduction:
    """The lines of one reduction, statement ``n`` of a body, whose result is the value ``v{n}``, ``[X, 1]``.

    Attributes:
        n, statement: which.
        argument: dtype of the value that it reduces.
        rows: the tile's other side.
        side: the reduced side, as it is where the lines are to stand.
    """

    n: int
    statement: Reduce
    argument: torch.dtype
    rows: int
    side: Side

    @property
    def shape(self) -> str:
        return f"[{self.rows}, {self.side.block}]"

    def start(self) -> list[str]:
        """``r{n}``, and for some ``q{n}``: the partial results of nothing."""
        n, kind = self.n, scalar_triton.value_type(self._accumulated)
        lines = [f"r{n} = tl.full({self.shape}, {self._identity}, {kind})"]
        if self._is_positional:
            lines.append(f"q{n} = tl.full({self.shape}, 0, tl.int64)")
        elif self.statement.operation == "deviations":
            lines.append(f"q{n} = tl.full({self.shape}, 0, {kind})")
        return lines

    def elements(self) -> list[str]:
        """``e{n}``: the tile of values to reduce, the operation's identity outside of the reduced space."""
        n, operation = self.n, self.statement.operation
        wanted = torch.bool if operation in ("any", "all") else self._accumulated
        value = scalar_triton.converted(f"v{self.statement.argument}", self.argument, wanted)
        if operation in ("any", "all"):
            value = f"{value}.to(tl.int32)"
        lines = [f"e{n} = tl.broadcast_to({value}, {self.shape})"]
        if self.side.overhangs:
            lines.append(f"e{n} = tl.where(r_inside, e{n}, {self._identity})")
        return lines

    def combined(self) -> list[str]:
        """Adds ``e{n}`` to the partial results."""
        n = self.n
        match self.statement.operation:
            case "sum":
                return [f"r{n} += e{n}"]
            case "prod":
                return [f"r{n} *= e{n}"]
            case "deviations":
                return self._deviated()
            case "argmax" | "argmin":
                position = f"tl.broadcast_to(r, e{n}.shape).to(tl.int64)"
                return [f"r{n}, q{n} = {self._function}(r{n}, q{n}, e{n}, {position})"]
            case _:
                return [f"r{n} = {self._function}(r{n}, e{n})"]

    def _deviated(self) -> list[str]:
        """Welford's update: each place of the tile has a mean ``r{n}`` and deviations ``q{n}`` of its own."""
        n, count = self.n, f"(r_start // {self.side.block} + 1)"
        lines = [f"d{n} = e{n} - r{n}"]
        if self.side.overhangs:
            lines.append(f"d{n} = tl.where(r_inside, d{n}, 0.0)")
        return [*lines, f"r{n} += d{n} * (1.0 / {count})", f"q{n} += d{n} * (e{n} - r{n})"]

    def finished(self) -> list[str]:
        """``v{n}`` of the partial results that a loop left."""
        n = self.n
        if self.statement.operation == "deviations":
            count, block, kind = (
                self.side.count,
                self.side.block,
                scalar_triton.value_type(self.statement.dtype),
            )
            counts = f"tl.broadcast_to((({count + block - 1} - r_base) // {block}).to({kind}), r{n}.shape)"
            joined = f"tl.reduce((r{n}, q{n}, {counts}), 1, join_deviations, keep_dims=True)"
            return [f"_, v{n}, _ = {joined}"]
        return self._reduced(f"r{n}", f"q{n}")

    def of_whole_rows(self) -> list[str]:
        """``v{n}`` of values that are all in the tile ``e{n}``."""
        n = self.n
        if self.statement.operation == "deviations":
            apart = f"e{n} - tl.sum(e{n}, 1, keep_dims=True) / {self.side.count}"
            if self.side.overhangs:
                apart = f"tl.where(r_inside, {apart}, 0.0)"
            return [f"d{n} = {apart}", f"v{n} = tl.sum(d{n} * d{n}, 1, keep_dims=True)"]
        return self._reduced(f"e{n}", "r")

    def _reduced(self, tile: str, position: str) -> list[str]:
        n, result = self.n, scalar_triton.value_type(self.statement.dtype)
        if self.statement.operation == "sum":
            return [f"v{n} = tl.sum({tile}, 1, keep_dims=True).to({result})"]
        if self._is_positional:
            position = f"tl.broadcast_to({position}, {tile}.shape).to(tl.int64)"
            return [f"_, v{n} = tl.reduce(({tile}, {position}), 1, {self._function}, keep_dims=True)"]
        end = " != 0" if self.statement.dtype == torch.bool else f".to({result})"
        return [f"v{n} = tl.reduce({tile}, 1, {self._function}, keep_dims=True){end}"]

    @property
    def _is_positional(self) -> bool:
        return self.statement.operation in ("argmax", "argmin")

    @property
    def _function(self) -> str:
        """Of the prelude: what joins two elements, or two with their positions."""
        operation = self.statement.operation
        if operation == "prod":
            return "product"
        if self._is_positional:
            return f"first_{operation[3:]}"
        side = "max" if operation in ("max", "any") else "min"
        return f"nan_{side}" if self._accumulated.is_floating_point else f"plain_{side}"

    @property
    def _accumulated(self) -> torch.dtype:
        if self.statement.operation in ("any", "all"):
            return torch.int32
        return self.argument if self._is_positional else self.statement.dtype

    @property
    def _identity(self) -> str:
        operation, computed = self.statement.operation, self._accumulated
        if operation in ("sum", "any", "deviations"):
            return "0"
        if operation in ("prod", "all"):
            return "1"
        smallest = operation in ("max", "argmax")
        if computed.is_floating_point:
            return "-float('inf')" if smallest else "float('inf')"
        if computed == torch.bool:
            return "0" if smallest else "1"
        limits = torch.iinfo(computed)
        return str(limits.min if smallest else limits.max)
