"""Which elements of a tensor its indices choose: the same for those who read there and those who add there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Emitter, LazyTensor


@dataclass(frozen=True)
class IndexedPlaces:
    """Chosen elements of a tensor.

    Attributes:
        shape: of what is chosen.
        indices: the tensors of integers that choose.
        are_rows: whether they choose rows, of which neighbours are read together.
        entries: maps an index into what is chosen to the one of the element in the tensor.
    """

    shape: tuple[int, ...]
    indices: tuple[LazyTensor, ...]
    are_rows: bool
    entries: Callable[[Emitter, Index], Index]


def places_at(
    shape: Sequence[int], indices: Sequence[LazyTensor | None], wraps: bool
) -> IndexedPlaces | None:
    """The elements of a tensor of ``shape`` at the indices that its dims have, as in ``x[indices]``; ``None`` if truth
    values choose.

    Args:
        wraps: negative indices count from the end.
    """
    used = {d: tensor for d, tensor in enumerate(indices) if tensor is not None}
    if not used or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in used.values()):
        return None
    broadcast = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in used.values())))
    first, last = min(used), max(used)
    if last - first >= len(used):
        first = 0  # dims between them are not indexed, so what is chosen comes first
    kept = [size for d, size in enumerate(shape) if d not in used]

    def entries(emitter: Emitter, index: Index) -> Index:
        chosen = index[first : first + len(broadcast)]
        rest = iter((*index[:first], *index[first + len(broadcast) :]))
        return tuple(
            emitter.indirect(emitter.broadcast(used[d], chosen), shape[d], wraps) if d in used else next(rest)
            for d in range(len(shape))
        )

    chosen_shape = (*kept[:first], *broadcast, *kept[first:])
    return IndexedPlaces(chosen_shape, tuple(used.values()), last < len(shape) - 1, entries)


def places_along(shape: Sequence[int], dim: int, indices: LazyTensor) -> IndexedPlaces | None:
    """The elements of a tensor of ``shape`` that differ from a point of ``indices`` in ``dim`` alone, where they are at
    that point's element, as in ``torch.gather``; ``None`` where there is no such dim."""
    if not shape or len(indices.shape) != len(shape):
        return None
    dim %= len(shape)

    def entries(emitter: Emitter, index: Index) -> Index:
        entry = emitter.indirect(emitter.element(indices, index), shape[dim], wraps=False)
        return (*index[:dim], entry, *index[dim + 1 :])

    return IndexedPlaces(indices.shape, (indices,), False, entries)
