"""Triton source of a batch: programs of all members in one grid, each of which finds its member first.

All pointers are arguments of the kernel, so that nothing has to be copied to the GPU before a launch and a CUDA graph
can hold it: those that all members share, and then each member's own, member by member. A program reads its member's
from where the arguments lie, by the member's number, so that a kernel is as long for two members as for a hundred.
Members of one size have numbers that follow each other, and what remains of a program's number after a division is its
place in its member; sizes are told apart by a tree of comparisons with constants. Compilers would rather choose among
all constants than jump, so a zero that they know nothing of is added to what a leaf chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.compile_core.ir.loops import LoopNest, NestBatch
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.nests.kernel_bases import ALIGNED_BYTES, separated
from gradsplit.compile_core.lowering.nests.passes import buffers_of
from gradsplit.compile_core.lowering.tiling.tiling_triton import tile_for_gpu
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import TritonWriter, triton_source
from gradsplit.compile_core.lowering.triton_kernels.triton_sides import Side

# Of members of one size so many pointers of a kind are given, if need be the last one's again: batches that differ in
# nothing but how many members they have are one kernel then.
_LEAST_GIVEN = 32


def generate_triton_batch(batch: NestBatch, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Triton for a valid batch over the buffers of one GPU.

    Raises:
        Unsupported: a dtype that Triton kernels do not handle (complex, quantised).
    """
    pairs: list[tuple[LoopNest, list[_Place]]] = []
    for member in batch.members:
        nest, found = separated(member, buffers)
        pairs.append((nest, [_place(name, start, buffers) for name, start in found.values()]))
    # In an order of their sizes: batches that differ in nothing but their members' order are one kernel.
    pairs.sort(key=lambda pair: (-prod(pair[0].extents), [place.rest for place in pair[1]]))
    members, places = [nest for nest, _ in pairs], [each for _, each in pairs]
    names = dict.fromkeys(buffers_of(members[0]))
    specs = {name: buffers[place.buffer] for name, place in zip(names, places[0], strict=True)}
    writer = _BatchWriter(members, places, specs)
    given = writer.arguments
    meta = (("num_warps", writer.tiling.num_warps),)
    lines, grid = writer.lines(), writer.grid()
    source = triton_source(batch.name, [place.buffer for place in given], buffers, lines, grid, meta)
    return replace(source, bases=tuple(place.base for place in given))


@dataclass(frozen=True)
class _Place:
    """Where something begins in a buffer: so many elements after ``base``, which is as aligned as the buffer."""

    buffer: str
    base: int
    rest: int


def _place(buffer: str, start: int, buffers: Mapping[str, TensorSpec]) -> _Place:
    rest = start % (ALIGNED_BYTES // buffers[buffer].dtype.itemsize)
    return _Place(buffer, start - rest, rest)


@dataclass(frozen=True)
class _Alike:
    """Members of one size, whose programs follow each other.

    Attributes:
        first: the number of the first one.
        count: of members.
        begin: the first program.
        programs: of each.
        size: the elements of each.
        rests: of those of their places that have any.
    """

    first: int
    count: int
    begin: int
    programs: int
    size: int
    rests: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + self.count * self.programs


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
        places: for each member where its buffers are.
    """

    def __init__(
        self,
        members: Sequence[LoopNest],
        places: Sequence[Sequence[_Place]],
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
        buffer_numbers = range(len(places[0]))
        self.shared = [k for k in buffer_numbers if len({replace(each[k], rest=0) for each in places}) == 1]
        self.own = [k for k in buffer_numbers if k not in self.shared]
        self.moved = [k for k in buffer_numbers if any(each[k].rest for each in places)]
        in_each = [super().grid()[0]] * len(sizes)
        if tiling is not None:
            in_each = [-(-size // tiling.x_block) for size in sizes]
        alike: list[_Alike] = []
        for number, (size, programs) in enumerate(zip(sizes, in_each, strict=True)):
            rests = tuple(places[number][k].rest for k in self.moved)
            last = alike[-1] if alike else None
            if last is not None and (size, rests) == (last.size, last.rests):
                alike[-1] = replace(last, count=last.count + 1)
            else:
                alike.append(_Alike(number, 1, last.end if last else 0, programs, size, rests))
        self.alike = [each for each in alike if each.programs] or alike[:1]
        given = list(places)
        if len(self.alike) == 1 and len(self.own) <= 2:
            given += [places[-1]] * (_LEAST_GIVEN - len(places))
        # What the kernel is given.
        self.arguments = [places[0][k] for k in self.shared] + [each[k] for each in given for k in self.own]

    def side(self, name: str, axes: Sequence[int], block: int) -> Side:
        side = super().side(name, axes, block)
        return _OpenSide(name, side.axes, side.extents, block) if name == "x" and self.is_open else side

    def grid(self) -> tuple[int, int, int]:
        return (self.alike[-1].end, 1, 1)

    def pointer(self, buffer: str) -> str:
        return f"q{self.positions[buffer]}"

    def _program(self) -> str:
        return "program.to(tl.int64)" if self.wide else "program"

    def lines(self) -> list[str]:
        lines = ["program = tl.program_id(0)", *self._choice(self.alike)]
        lines += [f"q{k} = p{number}" for number, k in enumerate(self.shared)]
        own = [f"p{number}" for number in range(len(self.shared), len(self.arguments))]
        chosen = ", ".join(f"q{k}" for k in self.own)
        if len(self.own) == 1:
            chosen += ","
        first = ", ".join(own[: len(self.own)])
        lines += [
            "if NVIDIA:",
            f'    {chosen} = pointers_of("{KERNEL_SYMBOL}_param_{len(self.shared)}", member, {first})',
            "else:",
            f"    {chosen} = chosen_pointers(member, {len(self.own)}, {', '.join(own)})",
        ]
        lines += [f"q{k} = q{k} + rest{k}" for k in self.moved]
        return lines + super().lines()

    def _choice(self, alike: Sequence[_Alike]) -> list[str]:
        """The member that a program works for, which program of that it is, and the member's variables."""
        if len(alike) == 1:
            return self._member(alike[0])
        middle = len(alike) // 2
        return [
            f"if program < {alike[middle].begin}:",
            *(f"    {line}" for line in self._choice(alike[:middle])),
            "else:",
            *(f"    {line}" for line in self._choice(alike[middle:])),
        ]

    def _member(self, alike: _Alike) -> list[str]:
        chosen = {f"rest{k}": rest for k, rest in zip(self.moved, alike.rests, strict=True)}
        if self.is_open:
            chosen["count"] = alike.size
        if len(self.alike) == 1:
            lines = [f"{name} = {value}" for name, value in chosen.items()]
            return [*lines, f"member = program // {alike.programs}", f"program = program % {alike.programs}"]
        chosen |= {"begin": alike.begin, "member": alike.first}
        text = f'"mov.b32 $0, 0; // {alike.first}"'
        values = ", ".join(map(str, chosen.values()))
        lines = [f"{', '.join(chosen)} = in_branch({text}, {values})", "program = program - begin"]
        if alike.count > 1:
            lines += [
                f"member = member + program // {alike.programs}",
                f"program = program % {alike.programs}",
            ]
        return lines
