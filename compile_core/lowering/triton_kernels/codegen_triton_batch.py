"""Triton source of a batch: programs of all members in one grid, each of which finds its member first.

Which member a program works for is a tree of comparisons with constants, at whose leaves the member's pointers, its
first program and its size are put into variables. All pointers are arguments of the kernel, so that nothing has to be
copied to the GPU before a launch and a CUDA graph can hold it; and Triton sees through the tree that all of them are
aligned. Compilers would rather load all arguments into registers and choose among them than jump, so a zero that they
know nothing of is added to what a leaf chooses. What follows is the loop of any one member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import LoopNest, NestBatch
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.kernel_bases import separated
from gradsplit.compile_core.lowering.nests.passes import buffers_of
from gradsplit.compile_core.lowering.tiling.tiling_triton import tile_for_gpu
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import TritonWriter, triton_source
from gradsplit.compile_core.lowering.triton_kernels.triton_sides import Side


def generate_triton_batch(batch: NestBatch, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for a valid batch over the buffers of one GPU.

    Raises:
        Unsupported: a dtype that Triton kernels do not handle (complex, quantised).
    """
    # In an order of their sizes: batches that differ in nothing but their members' order are one kernel.
    members = sorted(batch.members, key=lambda member: prod(member.extents), reverse=True)
    pairs = [separated(member, buffers) for member in members]
    given = {
        name: k for k, name in enumerate(dict.fromkeys(n for _, each in pairs for n, _ in each.values()))
    }
    pointers = [
        [f"p{given[name]}" + (f" + {base}" if base else "") for name, base in each.values()]
        for _, each in pairs
    ]
    specs = {name: buffers[buffer] for name, (buffer, _) in pairs[0][1].items()}
    writer = _BatchWriter([nest for nest, _ in pairs], pointers, specs)
    meta = (("num_warps", writer.tiling.num_warps),)
    return triton_source(batch.name, tuple(given), buffers, writer.lines(), writer.grid(), meta)


@dataclass(frozen=True)
class _OpenSide(Side):
    """A side whose length is a variable of the kernel."""

    @property
    def overhangs(self) -> bool:
        return True

    def index_lines(self, needed: object) -> list[str]:
        return [f"{self.name}_inside = {self.name} < count"]


class _BatchWriter(TritonWriter):
    """Writes the loop of the first member over the pointers ``q0``, ``q1`` and so on.

    Args:
        members: they have one body, but for the names of the buffers.
        pointers: for each member where its buffers are, in terms of the kernel's arguments.
    """

    def __init__(
        self,
        members: Sequence[LoopNest],
        pointers: Sequence[Sequence[str]],
        buffers: Mapping[str, TensorSpec],
    ) -> None:
        first = members[0]
        sizes = [prod(member.extents) for member in members]
        tiling = None
        self.is_open = False
        if any(member.extents != first.extents for member in members):
            tiling = tile_for_gpu(replace(first, extents=(sum(sizes),)))
            self.is_open = any(size % tiling.x_block for size in sizes)
            first = replace(first, extents=(max(sizes),))
        super().__init__(first, buffers, {name: k for k, name in enumerate(buffers_of(first))}, tiling)
        self.sizes, self.pointers = sizes, pointers
        in_each = [super().grid()[0]] * len(sizes)
        if tiling is not None:
            in_each = [-(-size // tiling.x_block) for size in sizes]
        self.starts = list(accumulate(in_each, initial=0))

    def side(self, name: str, axes: Sequence[int], block: int) -> Side:
        side = super().side(name, axes, block)
        return _OpenSide(name, side.axes, side.extents, block) if name == "x" and self.is_open else side

    def grid(self) -> tuple[int, int, int]:
        return (self.starts[-1], 1, 1)

    def pointer(self, buffer: str) -> str:
        return f"q{self.positions[buffer]}"

    def _program(self) -> str:
        return "program.to(tl.int64)" if self.wide else "program"

    def lines(self) -> list[str]:
        shared = [k for k, given in enumerate(zip(*self.pointers, strict=True)) if len(set(given)) == 1]
        lines = [f"q{k} = {self.pointers[0][k]}" for k in shared]
        own = [k for k in range(len(self.pointers[0])) if k not in shared]
        lines.append("program = tl.program_id(0)")
        lines += self._choice(0, len(self.pointers), own)
        lines.append("program = program - first")
        return lines + super().lines()

    def _choice(self, begin: int, end: int, own: Sequence[int]) -> list[str]:
        """The variables of the member, from ``begin`` up to ``end``, that a program works for."""
        if end - begin == 1:
            chosen = {f"q{k}": self.pointers[begin][k] for k in own} | {"first": f"{self.starts[begin]}"}
            if self.is_open:
                chosen["count"] = f"{self.sizes[begin]}"
            text = f'"mov.b32 $0, 0; // {begin}"'
            return [f"{', '.join(chosen)} = in_branch({text}, {', '.join(chosen.values())})"]
        middle = (begin + end) // 2
        return [
            f"if program < {self.starts[middle]}:",
            *(f"    {line}" for line in self._choice(begin, middle, own)),
            "else:",
            *(f"    {line}" for line in self._choice(middle, end, own)),
        ]
