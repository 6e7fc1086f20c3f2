"""Triton source of attention with changed scores.

A program has one head and a tile of the side that stays, queries or keys, and walks the other side in steps: first
the blocks of the block mask of which some scores count, then those of which all do, where the mask is not asked for. In
each step it computes a tile of scores and executes the body of them as a pointwise nest executes its own, the side that
stays along Y, the other along X. What does not vary along X, as the number of a query's document, is computed before.

The forward keeps maximum and sum of exponentials of each row, to the base of 2, as it goes (Dao, FlashAttention-2,
2023, with the blocks of FlexAttention, Dong et al., 2024); the gradients compute scores again from their logarithms.
Rows without a score that counts are zeros. Products are of the operands' dtype, everything else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import AttentionNest, Constant, Load, View, operands
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.live_statements import needed_statements
from gradsplit.compile_core.lowering.tiling.tiling_triton import LARGEST_INT32, GpuTiling, product_side
from gradsplit.compile_core.lowering.triton_kernels import scalar_triton
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import TritonWriter, triton_source

_LOG2_E = 1 / math.log(2)
_TYPES = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}


def generate_attention(nest: AttentionNest, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for one kernel of an attention.

    Raises:
        Unsupported: a dtype in the body that Triton kernels do not handle.
    """
    names = tuple(sorted(reads(nest) | writes(nest)))
    positions = {name: index for index, name in enumerate(names)}
    writer = _WRITERS[nest.part](nest, buffers, positions)
    meta = (("num_warps", nest.tile.warps), ("num_stages", nest.tile.stages), ("enable_fp_fusion", True))
    return triton_source(nest.name, names, buffers, writer.lines(), writer.grid(), meta)


@dataclass(frozen=True)
class _Walk:
    """A walk over blocks of the block mask: the lists of their numbers, and whether the mask is asked for."""

    counts: View
    indices: View
    is_masked: bool


class _AttentionWriter(TritonWriter):
    """What the three kernels have in common.

    Attributes:
        stays, walked: which dims of batch, heads, queries and keys a program has a tile of and walks.
        rows, columns: of a tile of scores: how many of the side that stays, and of the other.
        block: how many of the side that is walked a number in a list stands for.
        inside, of_scores: the statements of the body that vary from step to step, and those that depend on the score.
    """

    stays, walked = 2, 3

    def __init__(
        self, nest: AttentionNest, buffers: Mapping[str, TensorSpec], positions: Mapping[str, int]
    ) -> None:
        body = nest.body
        firsts = [sum(body.axes[:dim]) for dim in range(5)]
        axes = [tuple(range(a, b)) for a, b in pairwise(firsts)]
        sides = (0, 0, nest.tile.queries, nest.tile.keys)
        self.rows, self.columns = sides[self.stays], sides[self.walked]
        tiling = GpuTiling(
            x_axes=axes[self.walked],
            y_axes=axes[self.stays],
            x_block=self.columns,
            y_block=self.rows,
            r_block=1,
            persistent=False,
            num_warps=nest.tile.warps,
        )
        super().__init__(body.nest, buffers, positions, tiling)
        self.attention = nest
        query, key, value = nest.operands[:3]
        self.shape = (*query.shape[:3], key.shape[2])
        self.group = query.shape[1] // key.shape[1]
        self.elements = product_side(query.shape[3])
        self.value_elements = product_side(value.shape[3])
        self.dtype = _TYPES[buffers[query.buffer].dtype]
        # A block may reach beyond what there is of a side, and so may a tile in it that divides the side.
        block = nest.block_sizes[self.walked - 2]
        whole = -(-self.shape[self.walked] // self.columns) * self.columns
        self.block = min(block, whole) if block < self.shape[self.walked] else whole
        self.x = replace(self.x, block=self.block)
        self.batch, self.heads = self.side("z", axes[0], 1), self.side("h", axes[1], 1)
        self.sides = (self.x, self.y, self.batch, self.heads)
        self.wide = self._reaches_beyond_int32()
        self.y_programs = -(-self.shape[self.stays] // self.rows)
        self.inside, self.of_scores = self._depending(along_x=True), self._depending(along_x=False)

    def _reaches_beyond_int32(self) -> bool:
        """Whether what the body reads does; addresses of operands begin at a head."""
        return any(
            abs(s.access.offset)
            + sum(abs(t) * n for t, n in zip(s.access.strides, self.nest.extents, strict=True))
            + sum(abs(g.stride) * g.size for g in s.access.gathers)
            > LARGEST_INT32
            for number, s in enumerate(self.nest.body)
            if isinstance(s, Load) and not self._is_unreal(number)
        )

    def grid(self) -> tuple[int, int, int]:
        return (self.y_programs * self.shape[0] * self.shape[1], 1, 1)

    # ---- parts of a kernel --------------------------------------------------------------------------------

    def load(self, n: int, statement: Load) -> list[str]:
        body = self.attention.body
        named = {body.score: "scores", body.arriving: "arriving"}
        if statement.access.buffer in named:
            return [f"v{n} = {named[statement.access.buffer]}"]
        return super().load(n, statement)

    def place_of_program(self, heads: int) -> list[str]:
        """Which tile and head a program has; those come first that have the longest walk under causal masks."""
        wide = ".to(tl.int64)" if self.wide else ""
        tile = f"program % {self.y_programs}"
        tile = f"({self.y_programs - 1} - {tile})" if self.stays == 2 else f"({tile})"
        return [
            "program = tl.program_id(0)",
            f"y_first = {tile} * {self.rows}",
            f"head = program // {self.y_programs} % {heads}",
            f"z = (program // {self.y_programs * heads}){wide}",
            f"y = (y_first + tl.arange(0, {self.rows})[:, None]){wide}",
            f"e = tl.arange(0, {self.elements})",
            f"f = tl.arange(0, {self.value_elements})",
            *self.masks_and_axes(self.y),
            *self.masks_and_axes(self.batch),
        ]

    def base(self, name: str, view: View, head: str) -> str:
        """Where an operand has a head."""
        terms = [f"p{self.positions[view.buffer]}"]
        terms += [str(view.offset)] if view.offset else []
        for index, stride, size in zip(("z", head), view.stride, view.shape, strict=False):
            if stride and size > 1:
                terms.append(f"{index}.to(tl.int64) * {stride}")
        return f"{name}_base = {' + '.join(terms)}"

    def block_of(self, name: str, view: View, place: str, element: str, inside: str) -> str:
        """Reads a block of an operand, with zeros beyond it, at places of rows and of elements in them, each with two
        dims: which comes first says how the block lies."""
        count = view.shape[3]
        masks = [inside] if inside else []
        masks += [f"({element} < {count})"] if self._is_padded(count) else []
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        address = f"{name}_base + {place} * {view.stride[2]} + {element} * {view.stride[3]}"
        return f"{name} = tl.load({address}{mask})"

    @staticmethod
    def _is_padded(elements: int) -> bool:
        """Whether blocks have more elements in a row than there are."""
        return product_side(elements) != elements

    def statistics(self, sums: View, delta: View, index: str, inside: str) -> list[str]:
        """The two numbers that a gradient knows of each row of queries."""
        mask = f", mask={inside}, other=0.0" if inside else ""
        lines = [
            f"{name} = tl.load({name}_base + {index} * {view.stride[2]}{mask})"
            for name, view in (("sums", sums), ("delta", delta))
        ]
        # No score of such a row counts, so that all its weights are zeros.
        return [*lines, "sums = tl.where(sums == float('-inf'), 0.0, sums)"]

    def product(self, left: str, right: str, added: str = "") -> str:
        """A product of two blocks, in float32."""
        accumulator = f", {added}" if added else ""
        return f'tl.dot({left}, {right}{accumulator}, input_precision="{self.attention.precision}")'

    @property
    def y_inside(self) -> str:
        return "y_inside" if self.y.overhangs else ""

    def x_inside(self, dims: str = "x") -> str:
        if not self.x.overhangs:
            return ""
        return "x_inside" if dims == "x" else f"({dims} < {self.shape[self.walked]})"

    def walks(self) -> list[_Walk]:
        lists = self.attention.lists
        return [_Walk(*lists[k : k + 2], is_masked=k == 0) for k in range(0, len(lists), 2)]

    def walk(self, walk: _Walk, step: Sequence[str]) -> list[str]:
        """A loop over the tiles of the blocks in a list."""
        counts, indices = walk.counts, walk.indices
        wide = ".to(tl.int64)" if self.wide else ""
        steps = self.block // self.columns
        size = self.attention.block_sizes[self.stays - 2]
        row = f"y_first // {size}" if size < self.shape[self.stays] else "0"

        def address(view: View) -> str:
            terms = [f"p{self.positions[view.buffer]}", *([str(view.offset)] if view.offset else [])]
            for index, stride, count in zip(("z", "h", f"({row})"), view.stride, view.shape, strict=False):
                if count > 1:
                    terms.append(f"{index} * {stride}")
            return " + ".join(terms)

        number, within = (
            ("step", "0") if steps == 1 else (f"(step // {steps})", f"step % {steps} * {self.columns}")
        )
        lines = [
            f"count = tl.load({address(counts)}).to(tl.int32)",
            f"numbers = {address(indices)}",
            f"for step in range(0, count * {steps}):",
        ]
        first = f"tl.load(numbers + {number} * {indices.stride[3]}).to(tl.int32) * {self.block}"
        inner = [
            f"x_first = {first}" + (f" + {within}" if steps > 1 else ""),
            f"x = (x_first + tl.arange(0, {self.columns})[None, :]){wide}",
            f"xr = x_first + tl.arange(0, {self.columns})[:, None]",
            *self.masks_and_axes(self.x),
            *step,
        ]
        return lines + [f"    {line}" for line in inner]

    # ---- the body -----------------------------------------------------------------------------------------

    def _needed(self, *values: int | None) -> list[int]:
        return needed_statements(self.nest.body, (value for value in values if value is not None))

    def _depending(self, along_x: bool) -> set[int]:
        """The statements whose values depend on the score, and those that vary along X as well."""
        found: set[int] = set()
        for n, statement in enumerate(self.nest.body):
            varies = along_x and self.analysis.axes[n] & set(self.x.axes)
            if varies or self._is_unreal(n) or found & set(operands(statement)):
                found.add(n)
        return found

    def _is_unreal(self, value: int | None) -> bool:
        statement = None if value is None else self.nest.body[value]
        unreal = (self.attention.body.score, self.attention.body.arriving)
        return isinstance(statement, Load) and statement.access.buffer in unreal

    def _in_walk(self, values: Sequence[int]) -> list[str]:
        return [line for n in values if n in self.inside for line in self.statement(n)]

    def before_walks(self) -> list[str]:
        """What the body needs and is the same for all steps."""
        body = self.attention.body
        needed = self._needed(body.keep, body.changed, body.gradient)
        return [line for n in needed if n not in self.inside for line in self.statement(n)]

    def scores_changed(self, left: str, right: str, is_masked: bool) -> list[str]:
        """A tile of scores, changed, times log2(e), and -inf where they do not count: ``powers``."""
        body, scale = self.attention.body, self.attention.scale
        product = self.product(left, right)
        mask = [body.keep] if is_masked else []
        if self._is_unreal(body.changed) and (body.gradient is None or self._is_unreal(body.gradient)):
            lines = [f"scores = {product}", *self._in_walk(self._needed(*mask))]
            lines.append(f"powers = scores * {scale * _LOG2_E!r}")
        else:
            lines = [f"scores = {product} * {scale!r}", *self._in_walk(self._needed(body.changed, *mask))]
            lines.append(f"powers = {self._whole(body.changed)} * {_LOG2_E!r}")
        keep = self.keep(is_masked)
        return [*lines, f"powers = tl.where({keep}, powers, float('-inf'))"] if keep else lines

    def _whole(self, value: int) -> str:
        """A value with an element for each score of the tile."""
        return f"v{value}" if value in self.of_scores else f"(v{value} + tl.zeros_like(scores))"

    def keep(self, is_masked: bool) -> str:
        """Which scores of a tile count; empty for all."""
        number = self.attention.body.keep
        statement = self.nest.body[number]
        is_all = isinstance(statement, Constant) and statement.value
        parts = [f"v{number}"] if is_masked and not is_all else []
        parts += [self.x_inside()] if self.x.overhangs else []
        return " & ".join(parts)

    def gradient(self, is_masked: bool) -> list[str]:
        """The gradient of a tile of scores, from that of the changed ones: ``of_scores``."""
        body = self.attention.body
        assert body.gradient is not None
        known = set(self._needed(body.changed, *([body.keep] if is_masked else [])))
        lines = self._in_walk([n for n in self._needed(body.gradient) if n not in known])
        lines.append(f"of_scores = {self._whole(body.gradient)}")
        keep = self.keep(is_masked)
        return [*lines, f"of_scores = tl.where({keep}, of_scores, 0.0)"] if keep else lines

    def store(self, view: View | None, value: str, inside: str, elements: str = "") -> list[str]:
        """Stores rows of a result, or a number for each row."""
        if view is None:
            return []
        masks = [inside] if inside else []
        address = f"result_base + y * {view.stride[2]}"
        if elements:
            address += f" + {elements}[None, :] * {view.stride[3]}"
            if self._is_padded(view.shape[3]):
                masks.append(f"({elements}[None, :] < {view.shape[3]})")
        head = "head" if self.stays == 3 else "h"
        stored = scalar_triton.stored(value, torch.float32, self.buffers[view.buffer].dtype)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return [self.base("result", view, head), f"tl.store({address}, {stored}{mask})"]


class _ForwardWriter(_AttentionWriter):
    """Walks keys for a tile of queries."""

    def lines(self) -> list[str]:
        query, key, value = self.attention.operands
        result, sums, maxima = self.attention.results
        lines = [
            *self.place_of_program(self.shape[1]),
            "h = head",
            *self.masks_and_axes(self.heads),
            self.base("query", query, "h"),
            self.base("key", key, f"(h // {self.group})"),
            self.base("value", value, f"(h // {self.group})"),
            self.block_of("query", query, "y", "e[None, :]", self.y_inside),
            f"maximum = tl.full([{self.rows}, 1], float('-inf'), tl.float32)",
            f"total = tl.zeros([{self.rows}, 1], tl.float32)",
            f"accumulated = tl.zeros([{self.rows}, {self.value_elements}], tl.float32)",
            *self.before_walks(),
        ]
        for walk in self.walks():
            step = [
                self.block_of("key", key, "x", "e[:, None]", self.x_inside()),
                *self.scores_changed("query", "key", walk.is_masked),
                "highest = tl.maximum(maximum, tl.max(powers, 1, keep_dims=True))",
                # Of a row of which no score counts so far.
                "origin = tl.where(highest == float('-inf'), 0.0, highest)",
                "weights = tl.exp2(powers - origin)",
                "before = tl.exp2(maximum - origin)",
                "total = total * before + tl.sum(weights, 1, keep_dims=True)",
                self.block_of("value", value, "xr", "f[None, :]", self.x_inside("xr")),
                f"accumulated = {self.product(f'weights.to({self.dtype})', 'value', 'accumulated * before')}",
                "maximum = highest",
            ]
            lines += self.walk(walk, step)
        lines += [
            "accumulated = accumulated / tl.where(total == 0.0, 1.0, total)",
            *self.store(result, "accumulated", self.y_inside, "f"),
            "sums = tl.where(total == 0.0, float('-inf'), maximum + tl.log2(total))",
            *self.store(sums, "sums", self.y_inside),
            *self.store(maxima, "maximum", self.y_inside),
        ]
        return lines


class _QueryGradientWriter(_AttentionWriter):
    """Walks keys for a tile of queries."""

    def lines(self) -> list[str]:
        query, key, value, gradient, sums, delta = self.attention.operands
        lines = [
            *self.place_of_program(self.shape[1]),
            "h = head",
            *self.masks_and_axes(self.heads),
            self.base("query", query, "h"),
            self.base("key", key, f"(h // {self.group})"),
            self.base("value", value, f"(h // {self.group})"),
            self.base("gradient", gradient, "h"),
            self.base("sums", sums, "h"),
            self.base("delta", delta, "h"),
            self.block_of("query", query, "y", "e[None, :]", self.y_inside),
            self.block_of("gradient", gradient, "y", "f[None, :]", self.y_inside),
            *self.statistics(sums, delta, "y", self.y_inside),
            f"accumulated = tl.zeros([{self.rows}, {self.elements}], tl.float32)",
            *self.before_walks(),
        ]
        for walk in self.walks():
            step = [
                self.block_of("key", key, "x", "e[:, None]", self.x_inside()),
                self.block_of("value", value, "x", "f[:, None]", self.x_inside()),
                *self.scores_changed("query", "key", walk.is_masked),
                "weights = tl.exp2(powers - sums)",
                f"arriving = weights * ({self.product('gradient', 'value')} - delta)",
                *self.gradient(walk.is_masked),
                f"accumulated = {self.product(f'of_scores.to({self.dtype})', 'tl.trans(key)', 'accumulated')}",
            ]
            lines += self.walk(walk, step)
        scaled = f"accumulated * {self.attention.scale!r}"
        return [*lines, *self.store(self.attention.results[0], f"({scaled})", self.y_inside, "e")]


class _KeyGradientsWriter(_AttentionWriter):
    """Walks queries for a tile of keys, for one head of queries after the other that read them."""

    stays, walked = 3, 2

    def lines(self) -> list[str]:
        _, key, value, *_ = self.attention.operands
        of_key, of_value = self.attention.results
        return [
            *self.place_of_program(self.shape[1] // self.group),
            self.base("key", key, "head"),
            self.base("value", value, "head"),
            self.block_of("key", key, "y", "e[None, :]", self.y_inside),
            self.block_of("value", value, "y", "f[None, :]", self.y_inside),
            f"of_key = tl.zeros([{self.rows}, {self.elements}], tl.float32)",
            f"of_value = tl.zeros([{self.rows}, {self.value_elements}], tl.float32)",
            f"for member in range({self.group}):",
            *(f"    {line}" for line in self._walk_of_head()),
            f"of_key = of_key * {self.attention.scale!r}",
            *self.store(of_key, "of_key", self.y_inside, "e"),
            *self.store(of_value, "of_value", self.y_inside, "f"),
        ]

    def grid(self) -> tuple[int, int, int]:
        return (self.y_programs * self.shape[0] * (self.shape[1] // self.group), 1, 1)

    def _walk_of_head(self) -> list[str]:
        query, _, _, gradient, sums, delta = self.attention.operands
        lines = [
            f"h = head * {self.group} + member",
            *self.masks_and_axes(self.heads),
            self.base("query", query, "h"),
            self.base("gradient", gradient, "h"),
            self.base("sums", sums, "h"),
            self.base("delta", delta, "h"),
            *self.before_walks(),
        ]
        for walk in self.walks():
            step = [
                self.block_of("query", query, "x", "e[:, None]", self.x_inside()),
                *self.statistics(sums, delta, "x", self.x_inside()),
                *self.scores_changed("key", "query", walk.is_masked),
                "weights = tl.exp2(powers - sums)",
                self.block_of("gradient", gradient, "xr", "f[None, :]", self.x_inside("xr")),
                f"of_value = {self.product(f'weights.to({self.dtype})', 'gradient', 'of_value')}",
                f"arriving = weights * ({self.product('value', 'tl.trans(gradient)')} - delta)",
                *self.gradient(walk.is_masked),
                f"of_key = {self.product(f'of_scores.to({self.dtype})', 'tl.trans(query)', 'of_key')}",
            ]
            lines += self.walk(walk, step)
        return lines


_WRITERS: Mapping[str, type[_AttentionWriter]] = {
    "forward": _ForwardWriter,
    "query_gradient": _QueryGradientWriter,
    "key_gradients": _KeyGradientsWriter,
}
