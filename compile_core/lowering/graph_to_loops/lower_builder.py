"""The program under construction: buffers, steps, and the moment at which a tensor gets memory.

Limits: shapes are static; tensors are strided and of real dtypes (complex and quantised ones only pass
through torch's own operators).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.loops import ExternCall, LoopNest, Step, View
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, compute_dtype, contiguous_strides
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Affine, AxisSplitError, Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import (
    Cost,
    Emitter,
    LazyTensor,
    NeedsMemoryError,
)

_NAME_LENGTH = 60


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``stride`` where it describes a permutation of a row-major tensor, else row-major strides."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return contiguous_strides(tuple(shape))
        expected *= size
    return tuple(stride)


class ProgramBuilder:
    """Collects buffers and steps; rules call ``realise``, ``store_into`` and ``call``."""

    def __init__(self) -> None:
        self.buffers: dict[str, TensorSpec] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self.destinations: list[str] = []
        self._names: dict[str, int] = {}

    # -- names and buffers

    def unique_name(self, wanted: str) -> str:
        count = self._names.get(wanted, 0)
        self._names[wanted] = count + 1
        if not count:
            return wanted
        return self.unique_name(f"{wanted}_{count}")

    def new_buffer(self, wanted: str, spec: TensorSpec) -> View:
        """A temporary of this spec; the view covers it."""
        name = self.unique_name(wanted)
        self.buffers[name] = spec
        return View(name, spec.shape, spec.stride)

    def new_like(self, wanted: str, fake: torch.Tensor) -> View:
        """A temporary for a result that the graph gives these strides, without gaps."""
        stride = dense_strides(fake.shape, fake.stride())
        return self.new_buffer(wanted, TensorSpec(tuple(fake.shape), stride, fake.dtype, fake.device))

    def buffer_dtype(self, name: str) -> torch.dtype:
        return self.buffers[name].dtype

    def in_memory(self, view: View, layout: Sequence[int], origin: str) -> LazyTensor:
        """A tensor that lies at ``view``."""
        spec = self.buffers[view.buffer]
        return LazyTensor(view.shape, spec.dtype, spec.device, tuple(layout), origin, view=view)

    def add_constant(self, wanted: str, tensor: torch.Tensor) -> View:
        view = self.new_buffer(wanted, TensorSpec.of(tensor))
        self.constants[view.buffer] = tensor
        return view

    # -- memory for tensors

    def realise(self, tensor: LazyTensor) -> View:
        """Where the tensor lies in memory; emits the nest that computes it if it lies nowhere yet."""
        view = tensor.located()
        if view is not None:
            return view
        if tensor.base is not None and tensor.restride is not None and tensor.base.numel <= tensor.numel:
            self.realise(tensor.base)
            view = tensor.located()
            if view is not None:
                return view
        stride = dense_strides(tensor.shape, tensor.layout)
        return self.realise_at(
            tensor,
            self.new_buffer(tensor.origin, TensorSpec(tensor.shape, stride, tensor.dtype, tensor.device)),
        )

    def realise_at(self, tensor: LazyTensor, view: View) -> View:
        """Gives a tensor its place in memory: computes it into ``view``."""
        self.store_into(view, tensor)
        tensor.view = view
        if not tensor.is_free:
            tensor.body = None
        return view

    def realise_row_major(self, tensor: LazyTensor) -> None:
        """Makes every reshape of the tensor expressible: moves it to row-major memory."""
        spec = TensorSpec.contiguous(tensor.shape, tensor.dtype, tensor.device)
        self.realise_at(tensor, self.new_buffer(tensor.origin, spec))

    def store_into(self, view: View, tensor: LazyTensor) -> None:
        """Emits a nest that writes the tensor's elements to ``view``."""
        if not tensor.numel:
            return

        def body(emitter: Emitter, index: Index) -> None:
            emitter.store(emitter.access(view, index), emitter.element(tensor, index))

        self.emit_nest(tensor.shape, (), body, tensor.origin)

    def reduce_into(
        self,
        view: View,
        tensor: LazyTensor,
        dims: Sequence[int],
        operation: str,
        dtype: torch.dtype,
        finish: Callable[[Emitter, int], int],
        origin: str,
    ) -> None:
        """Emits a nest that reduces ``dims`` of a tensor.

        Args:
            view: of the result's shape, with or without size-1 dims in place of the reduced ones.
            dtype: of the accumulator; the elements are cast to it first.
            finish: maps the reduced value to the one that is stored.
        """
        count = prod(tensor.shape[d] for d in dims)
        keeps_dims = len(view.shape) == len(tensor.shape)

        def body(emitter: Emitter, index: Index) -> None:
            element = emitter.element(tensor, index)
            if operation in ("argmax", "argmin"):
                element = emitter.round_to(element, tensor.dtype)  # ties are between elements as stored
            else:
                element = emitter.cast(element, dtype)
            # a reduction of single elements is none, and must not become one when its nest is joined
            if count > 1:
                reduced = emitter.reduce(operation, element, dtype)
            elif operation == "sum" and dtype.is_floating_point:
                # Sums begin with zero, which a negative zero does not change.
                reduced = emitter.apply("add", (element, emitter.constant(0.0, dtype)), dtype)
            else:
                reduced = element
            result = finish(emitter, reduced)
            kept = [
                Affine() if d in dims else entry
                for d, entry in enumerate(index)
                if keeps_dims or d not in dims
            ]
            emitter.store(emitter.access(view, tuple(kept)), result)

        single = tensor if operation in ("argmax", "argmin") else None
        self.emit_nest(tensor.shape, dims, body, origin, uncut=single)

    def emit_nest(
        self,
        shape: Sequence[int],
        reduced_dims: Iterable[int],
        body: Callable[[Emitter, Index], None],
        origin: str,
        uncut: LazyTensor | None = None,
    ) -> None:
        """Emits a nest over the dims of ``shape``, cutting axes as finely as ``body`` needs.

        Args:
            uncut: if given, no axis may be cut, and this tensor is realised instead.
        """
        reduced = set(reduced_dims)
        order = [d for d in range(len(shape)) if d not in reduced] + [
            d for d in range(len(shape)) if d in reduced
        ]
        emitter, cuts = self.emit_over(shape, order, body, uncut)
        reduced_axes = sum(len(cuts[d]) for d in reduced)
        origins = (*(name for name in emitter.origins if name != origin), origin)
        name, statements = self.nest_name(origins), tuple(emitter.statements)
        self.steps.append(LoopNest(name, emitter.extents, reduced_axes, statements, origins))

    def emit_over(
        self,
        shape: Sequence[int],
        order: Sequence[int],
        body: Callable[[Emitter, Index], None],
        uncut: LazyTensor | None = None,
    ) -> tuple[Emitter, Mapping[int, Sequence[int]]]:
        """A body over the dims of ``shape`` in an order, and the extents of the axes that each dim is cut into."""
        cuts: dict[int, list[int]] = {d: [shape[d]] if shape[d] != 1 else [] for d in range(len(shape))}
        while True:
            extents = [extent for d in order for extent in cuts[d]]
            entries: dict[int, Affine] = {}
            axes: list[tuple[int, int]] = []
            for d in order:
                entry = Affine()
                for position, extent in enumerate(cuts[d]):
                    entry = entry.plus(Affine.axis(len(axes), prod(cuts[d][position + 1 :])))
                    axes.append((d, position))
                    assert extents[len(axes) - 1] == extent
                entries[d] = entry
            emitter = Emitter(extents, self.buffer_dtype)
            try:
                body(emitter, tuple(entries[d] for d in range(len(shape))))
            except AxisSplitError as split:
                if uncut is not None:
                    self.realise_row_major(uncut)
                    continue
                d, position = axes[split.axis]
                cuts[d][position : position + 1] = [cuts[d][position] // split.inner, split.inner]
            except NeedsMemoryError as need:
                if need.tensor.base is None and need.tensor.located() is None:
                    self.realise(need.tensor)
                else:
                    self.realise_row_major(need.tensor)
            else:
                return emitter, cuts

    def nest_name(self, origins: Iterable[str]) -> str:
        kinds = dict.fromkeys(origin.rstrip("0123456789").rstrip("_") for origin in origins)
        return self.unique_name(("fused_" + "_".join(kinds))[:_NAME_LENGTH].rstrip("_"))

    # -- torch's own kernels

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[str | None],
        out: Mapping[str, View],
        origin: str,
    ) -> None:
        """Appends a call; tensors among the arguments are realised."""

        def place(argument: Any) -> Any:
            return self.realise(argument) if isinstance(argument, LazyTensor) else argument

        places = tree_map(
            place, (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, LazyTensor)
        )
        self.steps.append(
            ExternCall(target, tuple(places[0]), places[1], tuple(outputs), dict(out), (origin,))
        )


def pointwise(
    result: torch.Tensor, origin: str, emit: Callable[[Emitter, Index], int], cost: Cost
) -> LazyTensor:
    """A tensor with a body, like the fake ``result``; the body's value is cast to the result's dtype."""
    dtype = compute_dtype(result.dtype)

    def body(emitter: Emitter, index: Index) -> int:
        return emitter.cast(emit(emitter, index), dtype)

    return LazyTensor(
        tuple(result.shape), result.dtype, result.device, tuple(result.stride()), origin, body=body, cost=cost
    )


def static_spec(fake: torch.Tensor, name: str) -> TensorSpec:
    """The spec of a node's fake value.

    Raises:
        Unsupported: symbolic sizes, or a layout other than strided.
    """
    if any(not isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        raise Unsupported("symbolic-shape", f"{name} has a symbolic shape {tuple(fake.shape)}")
    if fake.layout != torch.strided:
        raise Unsupported("sparse-tensor", f"{name} has the layout {fake.layout}")
    return TensorSpec.of(fake)
