"""Tensors as the lowering sees them: a place in memory, a body to inline, or a re-indexing of another tensor.

A ``Tensor``'s body is a function from an index to a value, called with the emitter of the nest that needs an
element ("define by run"). Inlining a producer is thus calling its body; views of something without a place in
memory only change the index; and one body can be emitted into any number of nests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch

from gradsplit.compile_core.ir.loops import Access, Gather, Load, View
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import (
    Affine,
    Entry,
    Index,
    Indirect,
    NotAffineError,
)
from gradsplit.compile_core.lowering.nests.body_builder import BodyBuilder
from gradsplit.compile_core.lowering.nests.live_statements import live_statements

EmitValue = Callable[["Emitter", Index], int]
Reindex = Callable[["Emitter", Index], Index]


@dataclass(frozen=True)
class Cost:
    """What inlining a value once more costs.

    Attributes:
        reads: numbers of elements read, by buffer.
        operations: scalar operations per element.
        transcendental: how many of them are exponentials, error functions and the like.
    """

    reads: frozenset[tuple[str, int]] = frozenset()
    operations: int = 0
    transcendental: int = 0


@dataclass(eq=False)
class LazyTensor:
    """A tensor of the graph; exactly one of ``view``, ``body`` and ``base`` says what its elements are.

    Attributes:
        layout: strides to use when it gets memory of its own.
        origin: name of the graph node.
        view: where it lies in memory, once it does.
        body: computes an element.
        base: the tensor that this one is a view of, with ``reindex`` from an index of this one to an index of
            the base and ``restride`` from the base's place in memory to this one's (``None``: cannot be
            expressed by strides).
        cost: of inlining it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: tuple[int, ...]
    origin: str
    view: View | None = None
    body: EmitValue | None = None
    base: LazyTensor | None = None
    reindex: Reindex | None = None
    restride: Callable[[View], View | None] | None = None
    cost: Cost = field(default_factory=Cost)
    _unsuitable: View | None = field(default=None, init=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def root(self) -> LazyTensor:
        """What it is a view of, in the end."""
        return self if self.base is None else self.base.root

    @property
    def is_free(self) -> bool:
        """Whether computing an element takes less than reading it: constants, positions."""
        return self.body is not None and not self.cost.reads and self.cost.operations <= 4

    def located(self) -> View | None:
        """Its place in memory if it has one already."""
        if self.view is None and self.base is not None and self.restride is not None:
            place = self.base.located()
            if place is not None and place != self._unsuitable:
                self.view = self.restride(place)
                self._unsuitable = place if self.view is None else None
        return self.view

    def current_cost(self) -> Cost:
        view = self.located()
        if view is not None and not self.is_free:
            return Cost(frozenset({(view.buffer, self.numel)}))
        return self.cost if self.base is None else self.base.current_cost()


class NeedsMemoryError(Exception):
    """The nest being emitted can only index ``tensor`` once that lies in memory, row-major."""

    def __init__(self, tensor: LazyTensor) -> None:
        super().__init__(f"{tensor.origin} must be realised")
        self.tensor = tensor


class Emitter(BodyBuilder):
    """A body under construction, with the tensors that were inlined into it."""

    def __init__(self, extents: Sequence[int], buffer_dtype: Callable[[str], torch.dtype]) -> None:
        super().__init__(extents, buffer_dtype)
        self.origins: dict[str, None] = {}
        self._mask: int | None = None
        self._emitted: dict[tuple[int, Index, int | None], int] = {}
        self._affine_of: dict[int, Affine] = {}

    def element(self, tensor: LazyTensor, index: Index) -> int:
        """The element at ``index``, in the compute dtype of the tensor's dtype."""
        key = (id(tensor), index, self._mask)
        value = self._emitted.get(key)
        if value is None:
            value = self._emitted[key] = self._emit(tensor, index)
        return value

    def _emit(self, tensor: LazyTensor, index: Index) -> int:
        if not tensor.numel:
            return self.constant(0, tensor.dtype)  # under a mask that is never set: there is no element
        view = tensor.located()
        if view is not None and not tensor.is_free:
            return self.load(self.access(view, index), self._mask)
        if tensor.base is not None and tensor.reindex is not None:
            try:
                base_index = tensor.reindex(self, index)
            except NotAffineError:
                raise NeedsMemoryError(tensor.base) from None
            return self.element(tensor.base, base_index)
        assert tensor.body is not None
        value = tensor.body(self, index)
        self.origins[tensor.origin] = None
        return value

    def broadcast(self, tensor: LazyTensor, index: Index) -> int:
        """The element of a tensor that broadcasts to the shape which ``index`` is for."""
        tail = index[len(index) - len(tensor.shape) :]
        return self.element(
            tensor,
            tuple(Affine() if size == 1 else entry for size, entry in zip(tensor.shape, tail, strict=True)),
        )

    def access(self, view: View, index: Index) -> Access:
        """The address of an element of a strided view."""
        address = Affine(view.offset)
        gathers = []
        for entry, stride, size in zip(index, view.stride, view.shape, strict=True):
            if isinstance(entry, Indirect):
                gathers.append(Gather(entry.value, stride, size, entry.wraps))
            else:
                address = address.plus(entry.scaled(stride))
        return Access(view.buffer, self._strides(address), address.offset, tuple(gathers))

    def _strides(self, entry: Affine) -> tuple[int, ...]:
        strides = dict(entry.terms)
        return tuple(strides.get(axis, 0) for axis in range(len(self.extents)))

    def affine_value(self, entry: Affine) -> int:
        """An affine index entry as an int64 value."""
        value = self.point(self._strides(entry), entry.offset)
        self._affine_of[value] = entry
        return value

    def indirect(self, value: int, size: int, wraps: bool) -> Entry:
        """An integer value as an index into a dim of ``size``; plain affine where the value is one and in
        range.
        """
        entry = self._affine_of.get(value)
        known = self.constant_of(value)
        if known is not None:
            entry = Affine(int(known))
        if entry is not None:
            low, high = entry.bounds(self.extents)
            if low >= 0 and high < size:
                return entry
        return Indirect(value, size, wraps)

    def gathered(self, tensor: LazyTensor, index: Index) -> int:
        """The element at an index with entries that the program made: it raises where one is out of range.

        A body may shift such an entry or leave it out; then only the memory of the whole tensor can be read by it.
        """
        view = tensor.located()
        if view is not None:
            return self.load(self.access(view, index), self._mask)
        value = self.element(tensor, index)
        used = [self.statements[n] for n in live_statements(self.statements, (value,))]
        loads = [s for s in used if isinstance(s, Load) and s.mask in (None, self._mask)]
        checked = {(g.value, g.size, g.wraps) for load in loads for g in load.access.gathers}
        if all((e.value, e.size, e.wraps) in checked for e in index if isinstance(e, Indirect)):
            return value
        raise NeedsMemoryError(tensor)

    def shifted(self, entry: Entry, factor: int, shift: int, size: int) -> Entry:
        """``entry * factor + shift`` as an index into a dim of ``size``."""
        if isinstance(entry, Affine):
            return entry.scaled(factor, shift)
        if (factor, shift, size) == (1, 0, entry.size):
            return entry
        value = self.position(entry)
        value = self.apply("mul", (value, self.constant(factor, torch.int64)), torch.int64)
        value = self.apply("add", (value, self.constant(shift, torch.int64)), torch.int64)
        return Indirect(value, size)

    def position(self, entry: Entry) -> int:
        """An index entry as a nonnegative int64 value."""
        if isinstance(entry, Affine):
            return self.affine_value(entry)
        value = self.cast(entry.value, torch.int64)
        if not entry.wraps:
            return value
        wrapped = self.apply("add", (value, self.constant(entry.size, torch.int64)), torch.int64)
        negative = self.apply("lt", (value, self.constant(0, torch.int64)), torch.bool)
        return self.apply("where", (negative, wrapped, value), torch.int64)

    @contextmanager
    def masked(self, mask: int) -> Iterator[None]:
        """Inside, loads happen only where ``mask`` (and any enclosing mask) is true."""
        outer = self._mask
        self._mask = mask if outer is None else self.apply("logical_and", (outer, mask), torch.bool)
        try:
            yield
        finally:
            self._mask = outer


Argument = LazyTensor | float | int | bool
