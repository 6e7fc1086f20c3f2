"""The memory of a bucket plan: a flat buffer for each bucket, with a place for every gradient and its mark."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from gradsplit.bucketing.bucket import ALIGNMENT_BYTES, BucketPlan
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, contiguous_strides
from gradsplit.compile_core.torch_facts.autograd_engine import storage_use_count
from gradsplit.distributed.collectives.shared_buffers import SharedBuffer

_address_of = torch.Tensor.data_ptr
_holders_of = sys.getrefcount


class BucketBuffers:
    """Buffers filled with zeros, so that the padding between gradients reduces to zero, and after all gradients a mark
    for each (``MarksOfUse``).

    Attributes:
        plan: what they were made for.
        names: the parameters of each bucket.
        allocated: what was allocated for each bucket.
        flat: the buffer of each bucket, one-dimensional.
        places: by parameter, its gradient's part of a buffer, with the given strides.
        bucket_of: by parameter, the index of its bucket.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        strides: Mapping[str, tuple[int, ...]],
        allocate: Callable[[int, torch.dtype, torch.device], SharedBuffer],
    ) -> None:
        self.plan = plan
        self.names = [tuple(parameter.name for parameter in bucket.parameters) for bucket in plan.buckets]
        self.places: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._strides = strides
        self._offsets: dict[str, int] = {}
        self._ends: list[int] = []
        self.allocated: list[SharedBuffer] = []
        for bucket in plan.buckets:
            like = parameters[bucket.parameters[0].name]
            # Marks are aligned, too.
            aligned = ALIGNMENT_BYTES // like.itemsize
            self._ends.append(-(-bucket.numel // aligned) * aligned)
            numel = self._ends[-1] + len(bucket.parameters)
            self.allocated.append(allocate(numel, like.dtype, like.device))
            self.bucket_of |= dict.fromkeys(self.names[bucket.index], bucket.index)
            self._offsets |= zip(self.names[bucket.index], bucket.offsets_elements, strict=True)
        self.flat = [buffer.mine for buffer in self.allocated]
        for index in range(len(self.flat)):
            self.marks(index).fill_(math.inf)
        self._find_places(self._offsets)
        self._owners = [parameters[name] for name in self.places]
        # As long as nobody else has any of them.
        self._holders = max(map(_holders_of, self.places.values()))
        self._views = [*map(_views_of, self.flat)]

    @property
    def shared_bytes(self) -> int:
        """Of what other ranks reach."""
        return sum(buffer.mine.nbytes for buffer in self.allocated if buffer.is_shared)

    def marks(self, bucket: int) -> torch.Tensor:
        """Of a bucket, one for each of its parameters."""
        return self.flat[bucket][self._ends[bucket] :]

    def restore_places(self) -> None:
        """Places are given to the program, as gradients. It may have put other memory into them, by ``grad.data``; and
        what it holds that is no gradient any more keeps its values, and is no place.

        Called in every step, so the loops that always run are C's.
        """
        holders = [*map(_holders_of, self.places.values())]
        if max(holders) > self._holders:
            for place, owner, count in zip(self.places.values(), self._owners, holders, strict=True):
                if count > self._holders and owner.grad is not place:
                    place.data = place.clone()
        addresses = [*map(_address_of, self.places.values())]
        if addresses != self._addresses:
            self._find_places(
                name
                for name, now, before in zip(self.places, addresses, self._addresses, strict=True)
                if now != before
            )
        views = [*map(_views_of, self.flat)]
        if views != self._views:
            self._leave_viewed(views)

    def _leave_viewed(self, views: Sequence[int]) -> None:
        free = {
            name
            for (name, place), owner in zip(self.places.items(), self._owners, strict=True)
            if owner.grad is not place
        }
        for index, names in enumerate(self.names):
            if views[index] > self._views[index] and not free.isdisjoint(names):
                marks = self.marks(index)
                self.flat[index] = torch.zeros_like(self.flat[index])
                self.marks(index).copy_(marks)
                self._find_places(names)

    def refuse_changed(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """
        Raises:
            CompileError: the gradient of a parameter, as that is now, has no place.
        """
        for name, now in parameters.items():
            place = self.places[name]
            if (now.dtype, now.device, now.shape) != (place.dtype, place.device, place.shape):
                raise CompileError(
                    f"{name} was {described(place, place.device)} when its gradient was first reduced and is "
                    f"{described(now, now.device)} now: "
                    f"change a module's parameters before you make the DistributedDataParallel module"
                )

    def look_for_anomalies(self, names: Iterable[str]) -> None:
        """In its anomaly mode autograd looks at what functions return; programs do not return what they store here.

        Raises:
            RuntimeError: one of these gradients is not a number.
        """
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            for name in names:
                if self.places[name].isnan().any():
                    raise RuntimeError(f"a compiled backward returned nan values in the gradient of {name!r}")

    def is_kept(self, name: str) -> bool:
        """Whether somebody has the place, or a view of its bucket, besides the parameter whose gradient it is."""
        bucket = self.bucket_of[name]
        held = _holders_of(self.places[name]) > self._holders + 1
        return held or _views_of(self.flat[bucket]) > self._views[bucket]

    def _find_places(self, names: Iterable[str]) -> None:
        for name in names:
            memory, shape = self.flat[self.bucket_of[name]], self._shapes[name]
            # No view to autograd, so that programs may call ``grad.detach_()``.
            self.places[name] = memory.as_strided(shape, self._strides[name], self._offsets[name]).detach()
        self._addresses = [*map(_address_of, self.places.values())]

    def hold(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the buffer of this parameter's bucket."""
        place = self.places[name]
        return tensor is place or tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()


def _views_of(flat: torch.Tensor) -> int:
    """How many tensors there are in its memory."""
    return storage_use_count(flat.untyped_storage()._cdata)


def described(tensor: torch.Tensor, device: object) -> str:
    """Dtype, shape and device of a tensor in words, as ``float32[8, 3] on cpu``: what ranks' gradients must share."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]} on {device}"


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """How autograd lays out the gradients of a parameter: as it lies itself, if that is without gaps."""
    spec = TensorSpec.of(parameter)
    return spec.stride if spec.is_dense else contiguous_strides(spec.shape)
