"""The loop-level representation: what code generation sees of a program.

A ``LoopProgram`` is a list of steps over named strided buffers. A step is either a ``LoopNest`` (generated code) or an
``ExternCall`` (one of torch's own kernels). The idea is Halide's and TorchInductor's "define by body": a nest is its
iteration space and one straight-line body that is executed at every point of it; fusing two nests is concatenating
their bodies. Its limits keep it small: every address is an affine function of the loop axes plus, for gathers, of
integer values of the body. There is no division or remainder in an address: a reshape that strides cannot express
makes the lowering realise a contiguous buffer first.

Iteration space. ``extents`` lists the axes; the last ``reduced_axes`` of them are reduced, the others are parallel.
The body is in SSA form: statement ``n`` defines value ``n``. A value *varies* over all axes unless it is derived from
``Reduce`` (and from loads and constants that do not move along a reduced axis) only. ``Reduce`` combines its argument
over all reduced axes and yields a value that varies over the parallel axes alone; its result may feed statements that
vary over all axes again, as in ``x - max(x)``: the generator then makes another pass over the reduced axes. A ``Store``
whose access does not move along the reduced axes and whose value does not vary over them happens once per parallel
point; any other store happens at every point.

Sums in memory. A ``Store`` with a ``reduction`` combines its value with what the buffer holds there: points may meet at
one element, as where gathered indices repeat, and come in any order. It happens at every parallel point, whatever it
varies over. What the elements are to begin with an earlier step has stored; they are whole when the nest has ended, and
no 16-bit floats, which would be rounded each time.

Dtypes. A value has the dtype in which it is computed: ``bool``, an integer type, ``float32`` or ``float64``. Loads
widen 16-bit floats to ``float32``; stores round to the buffer's dtype. ``Apply("round_to", ...)`` rounds a value
through a narrower type where eager's semantics need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from gradsplit.compile_core.ir.tensor_spec import TensorSpec, same_strides


@dataclass(frozen=True)
class View:
    """A strided window of a buffer: sizes, strides and offset in elements of the buffer's dtype."""

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def has_strides(self, stride: Sequence[int]) -> bool:
        """Whether its elements lie as far apart as these strides say."""
        return 0 in self.shape or same_strides(self.shape, self.stride, stride)


@dataclass(frozen=True)
class Gather:
    """An address term ``value * stride`` with ``value`` in ``[0, size)``, or, if it ``wraps``, in ``[-size, size)``,
    where negative values count from the end.

    Generated code traps an index out of that range instead of reading outside the buffer.
    """

    value: int
    stride: int
    size: int
    wraps: bool = True


@dataclass(frozen=True)
class Access:
    """Where a load or store touches a buffer: ``offset + sum(axis * stride) + sum(gathers)``, in elements."""

    buffer: str
    strides: tuple[int, ...]
    offset: int = 0
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True)
class Load:
    """Reads a buffer. Where the bool value ``mask`` is given and false, nothing is read and the result is ``other``."""

    access: Access
    dtype: torch.dtype
    mask: int | None = None
    other: float | int | bool = 0


@dataclass(frozen=True)
class Constant:
    value: float | int | bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Position:
    """Where in the iteration space the body is, as an int64 value: ``offset + sum(axis * stride)``."""

    strides: tuple[int, ...]
    offset: int = 0
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Apply:
    """One operation of ``SCALAR_OPERATIONS`` on values of the body; ``dtype`` is the result's.

    ``parameter`` is the target dtype of ``round_to``; other operations have none.
    """

    operation: str
    arguments: tuple[int, ...]
    dtype: torch.dtype
    parameter: torch.dtype | None = None


@dataclass(frozen=True)
class Reduce:
    """Combines a value over the reduced axes by one of ``REDUCTIONS``; accumulates in ``dtype``.

    ``sum`` of floats may be reassociated. ``max`` and ``min`` propagate NaN as torch does. ``argmax`` and ``argmin``
    yield the int64 position along the (single) reduced axis of the first extremum, NaN first. ``deviations`` is the sum
    of the squared differences from the mean, of floats; only kernels for GPUs know it.
    """

    operation: str
    argument: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Store:
    """Writes a value, or combines it by one of ``MEMORY_REDUCTIONS`` with what is there; where ``mask`` is given and
    false, nothing is written."""

    access: Access
    value: int
    mask: int | None = None
    reduction: str | None = None


Statement = Load | Constant | Position | Apply | Reduce | Store

REDUCTIONS = frozenset({"sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "deviations"})
# Of those, the ones by which a store combines, extrema in kernels for CPUs only. NaN is propagated as by the others.
MEMORY_REDUCTIONS = frozenset({"sum", "max", "min"})

# name -> number of arguments. Meanings are those of the aten operator of the same name on scalars; integer division
# and remainder are Python's (floor), ``trunc_div`` is C's. Comparisons and ``logical_*`` yield bool. ``random_bits``
# and ``random_word`` are those of ``ir.counter_random``: 64 or 32 bits (int32) for an int64 seed and position.
SCALAR_OPERATIONS: Mapping[str, int] = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floor_div": 2, "trunc_div": 2, "remainder": 2, "fmod": 2, "pow": 2,
    "maximum": 2, "minimum": 2, "atan2": 2, "copysign": 2, "hypot": 2, "nextafter": 2,
    "neg": 1, "abs": 1, "sign": 1, "reciprocal": 1, "square": 1, "sqrt": 1, "rsqrt": 1,
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log10": 1, "log1p": 1,
    "sin": 1, "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1, "sinh": 1, "cosh": 1, "tanh": 1,
    "asinh": 1, "acosh": 1, "atanh": 1,
    "erf": 1, "erfc": 1, "sigmoid": 1, "lgamma": 1,
    "floor": 1, "ceil": 1, "round": 1, "trunc": 1,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2,
    "logical_and": 2, "logical_or": 2, "logical_xor": 2, "logical_not": 1, "isnan": 1, "isinf": 1,
    "bitwise_and": 2, "bitwise_or": 2, "bitwise_xor": 2, "bitwise_not": 1, "shift_left": 2, "shift_right": 2,
    "random_bits": 2, "random_word": 2,
    "where": 3, "cast": 1, "round_to": 1,
}  # fmt: skip


@dataclass(frozen=True)
class LoopNest:
    """One kernel to generate.

    Attributes:
        name: unique in its program, e.g. ``"fused_native_layer_norm_gelu_3"``.
        extents: axis sizes, parallel axes first (outermost first).
        reduced_axes: how many trailing axes are reduced.
        body: SSA statements; ``Store`` defines no usable value.
        origins: names of the graph nodes that it computes, for people.
    """

    name: str
    extents: tuple[int, ...]
    reduced_axes: int
    body: tuple[Statement, ...]
    origins: tuple[str, ...] = ()

    # Passes ask each nest again and again.
    @cached_property
    def buffers_read(self) -> frozenset[str]:
        """The buffers that it loads from or combines values with."""
        return combined_buffers(self).union(s.access.buffer for s in self.body if isinstance(s, Load))

    @cached_property
    def buffers_written(self) -> frozenset[str]:
        return frozenset(s.access.buffer for s in self.body if isinstance(s, Store))


@dataclass(frozen=True)
class NestBatch:
    """One kernel for several nests that are the same but for the names and the sizes of their buffers.

    Attributes:
        name: unique in its program.
        members: nests over the same axes, or without reductions over at most one axis each, with equal statements but
            for the names of the buffers and where they begin in them; none reads or overwrites what another writes.
    """

    name: str
    members: tuple[LoopNest, ...]

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(origin for member in self.members for origin in member.origins))


@dataclass(frozen=True)
class BandNest:
    """A nest of rows as a kernel that also adds up columns: a program takes a band of rows and leaves its sums.

    Attributes:
        name: unique in its program.
        rows: a nest with two axes, the rows and the elements of a row, which is the reduced one.
        band: how many rows a program takes; divides their number.
        sums: a value of the body, and the contiguous buffer of one row a band that takes its sum over the band's rows.
    """

    name: str
    rows: LoopNest
    band: int
    sums: tuple[tuple[int, str], ...]

    @property
    def origins(self) -> tuple[str, ...]:
        return self.rows.origins


@dataclass(frozen=True)
class ExternCall:
    """A call of one of torch's kernels.

    Attributes:
        target: the operator overload, or a ``KeptCall``.
        arguments, keywords: as for the operator, every tensor replaced by a ``View``.
        outputs: names of the buffers that it defines, ``None`` for a result nobody uses. A single-result operator has
            one entry.
        out: buffers that exist already and are passed as ``out=``/``out0=`` ... keywords to ``target``, which is then
            an out-variant; empty when the operator allocates its results.
    """

    target: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[str | None, ...]
    out: Mapping[str, View] = field(default_factory=dict)
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProductTile:
    """What one program of a matrix product computes: a block of the result, the inner side in steps."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int


@dataclass(frozen=True)
class ProductNest:
    """A matrix product as a generated kernel, whose elements go through a body on their way to memory.

    Attributes:
        name: unique in its program.
        left, right: ``[rows, inner]`` and ``[inner, columns]``, or three-dimensional with a batch first.
        product: name of the buffer that a load in ``epilogue`` stands for the product by: such a load is the element
            itself, in float32, not yet rounded. The buffer is in memory only if the epilogue stores to it.
        epilogue: a nest without reductions over the result's elements. Its axes are the batch's, the rows' and the
            columns', in this order.
        axes: how many axes of the epilogue each of these three has.
        tile: how it is cut.
        precision: ``"ieee"`` or ``"tf32"`` for float32; says nothing for 16-bit floats.
    """

    name: str
    left: View
    right: View
    product: str
    epilogue: LoopNest
    axes: tuple[int, int, int]
    tile: ProductTile
    precision: str = "ieee"

    @property
    def origins(self) -> tuple[str, ...]:
        return self.epilogue.origins


@dataclass(frozen=True)
class ScoreBody:
    """What is computed of each score of an attention, as a body over all scores.

    Attributes:
        nest: without reductions and stores, over batch, heads, queries and keys.
        axes: how many axes of the nest each of these four has.
        score, arriving: buffers that are not in memory: a load from them is the score itself, or the gradient of the
            changed score.
        keep, changed, gradient: the values that say whether a score counts, and that are the changed score, in float32,
            and the gradient of the score, which only a backward has.
    """

    nest: LoopNest
    axes: tuple[int, int, int, int]
    score: str
    arriving: str
    keep: int
    changed: int
    gradient: int | None = None


@dataclass(frozen=True)
class AttentionTile:
    """What one program of an attention computes: the side that stays, and the one that it walks in steps."""

    queries: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True)
class AttentionNest:
    """An attention with changed scores as a generated kernel, which has a tile of the scores at a time.

    Attributes:
        name: unique in its program.
        part: ``"forward"``, ``"query_gradient"`` or ``"key_gradients"``; the last walks queries, the others keys.
        operands: query, key, value, each ``[batch, heads, length, elements]``, where heads of queries are a multiple of
            those of keys; in a gradient also that of the result, ``[batch, heads, queries, elements]``, the logarithms
            of the sums of exponentials to the base of 2, and delta, each ``[batch, heads, queries]``.
        lists: for each block of the side that stays how many blocks of the other have scores that count, and which;
            then the same of blocks in which all scores count. Batch and heads may be one for all.
        block_sizes: how many queries and keys such a block has.
        results: the result, the logarithms, the maxima; or the gradients. None for what nobody reads.
        body: what is done to each score.
        scale: of the products of queries and keys.
        tile: how it is cut.
        precision: ``"ieee"`` or ``"tf32"`` for float32; says nothing for 16-bit floats.
        origins: names of the graph nodes that it computes, for people.
    """

    name: str
    part: str
    operands: tuple[View, ...]
    lists: tuple[View, ...]
    block_sizes: tuple[int, int]
    results: tuple[View | None, ...]
    body: ScoreBody
    scale: float
    tile: AttentionTile
    precision: str = "ieee"
    origins: tuple[str, ...] = ()


def operands(statement: Statement) -> tuple[int, ...]:
    """The values that a statement reads, in a fixed order."""
    match statement:
        case Load(access=access, mask=mask):
            read = tuple(gather.value for gather in access.gathers)
            return read if mask is None else (*read, mask)
        case Store(access=access, value=value, mask=mask):
            read = (value, *(gather.value for gather in access.gathers))
            return read if mask is None else (*read, mask)
        case Apply(arguments=arguments):
            return arguments
        case Reduce(argument=argument):
            return (argument,)
        case _:
            return ()


GeneratedStep = LoopNest | NestBatch | BandNest | ProductNest | AttentionNest
Step = GeneratedStep | ExternCall


@dataclass(frozen=True)
class Refusal:
    """Two nests that share memory traffic and were not joined.

    Attributes:
        first, second: names of the nests in the fused program.
        bytes: what joining them would have saved.
        reason: why not.
    """

    first: str
    second: str
    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.first} + {self.second}: {self.reason} ({self.bytes} bytes)"


@dataclass(frozen=True)
class LoopProgram:
    """A straight-line program over named buffers.

    Attributes:
        inputs: buffers that the caller passes, in order; written only if they are among ``overwritten``.
        destinations: buffers that the caller passes after the inputs and that the program writes fully.
        buffers: every buffer's spec, inputs, destinations, constants and temporaries.
        constants: names of buffers with data known at compile time.
        steps: in execution order. A temporary is allocated before the first step that writes it, freed after its last
            use; that is the linker's work.
        outputs: what the caller receives, in order: views of buffers, or ``None``.
        overwritten: inputs that hold a new value in the end, which is the output.
        kept: positions of outputs that may share memory with one another; see ``Compute.kept``.
        unfused: pairs of nests that share memory traffic and were not joined, those with most bytes first; known after
            fusion.
    """

    name: str
    inputs: tuple[str, ...]
    destinations: tuple[str, ...]
    buffers: Mapping[str, TensorSpec]
    constants: Mapping[str, torch.Tensor]
    steps: tuple[Step, ...]
    outputs: tuple[View | None, ...]
    overwritten: tuple[str, ...] = ()
    kept: frozenset[int] = frozenset()
    unfused: tuple[Refusal, ...] = ()


def varied_axes(nest: LoopNest) -> list[frozenset[int]]:
    """For each statement the axes over which its value varies; for a store, over which it must be repeated."""
    parallel = frozenset(range(len(nest.extents) - nest.reduced_axes))
    reduced = frozenset(range(len(parallel), len(nest.extents)))
    axes: list[frozenset[int]] = []
    for statement in nest.body:
        varied = frozenset().union(*(axes[operand] for operand in operands(statement)))
        if isinstance(statement, Load | Store | Position):
            strides = statement.strides if isinstance(statement, Position) else statement.access.strides
            varied |= frozenset(axis for axis, stride in enumerate(strides) if stride)
        elif isinstance(statement, Reduce):
            varied -= reduced
        if isinstance(statement, Store) and statement.reduction is not None:
            varied |= parallel
        axes.append(varied)
    return axes


def combined_buffers(nest: LoopNest) -> frozenset[str]:
    """The buffers with whose elements its stores combine values."""
    return frozenset(s.access.buffer for s in nest.body if isinstance(s, Store) and s.reduction is not None)


def additions(nest: LoopNest) -> int:
    """How many values it combines with elements of buffers."""
    varied = varied_axes(nest) if combined_buffers(nest) else []
    return sum(
        prod(nest.extents[axis] for axis in varied[n])
        for n, statement in enumerate(nest.body)
        if isinstance(statement, Store) and statement.reduction is not None
    )


def accesses(nest: LoopNest) -> list[Access]:
    """Of its loads and stores, in their order."""
    return [statement.access for statement in nest.body if isinstance(statement, Load | Store)]


def with_accesses(body: Sequence[Statement], change: Callable[[Access], Access]) -> tuple[Statement, ...]:
    """The body with other accesses in place of those of its loads and stores."""
    return tuple(replace(s, access=change(s.access)) if isinstance(s, Load | Store) else s for s in body)
