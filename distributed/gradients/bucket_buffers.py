"""The memory of a bucket plan: one flat buffer a bucket, and the place of every gradient in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bucketing.bucket import BucketPlan
from compile_core.ir.tensor_spec import TensorSpec, contiguous_strides

_address_of = torch.Tensor.data_ptr


class BucketBuffers:
    """Buffers filled with zeros, so that the padding between gradients reduces to zero.

    Attributes:
        plan: what they were made for.
        names: the parameters of each bucket.
        flat: the buffer of each bucket, one-dimensional.
        places: by parameter, its gradient's part of a buffer, with the given strides.
        bucket_of: by parameter, the index of its bucket.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        strides: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.plan = plan
        self.names = [tuple(parameter.name for parameter in bucket.parameters) for bucket in plan.buckets]
        self.flat: list[torch.Tensor] = []
        self.places: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._strides = strides
        for bucket in plan.buckets:
            like = parameters[bucket.parameters[0].name]
            self.flat.append(torch.zeros(bucket.numel, dtype=like.dtype, device=like.device))
            self.bucket_of |= dict.fromkeys(self.names[bucket.index], bucket.index)
        self._find_places()

    def restore_places(self) -> None:
        """Places are given to the program, as gradients; it may have put other memory into them, by ``grad.data``."""
        if [*map(_address_of, self.places.values())] != self._addresses:
            self._find_places()

    def _find_places(self) -> None:
        for bucket, flat in zip(self.plan.buckets, self.flat, strict=True):
            for parameter, offset in zip(bucket.parameters, bucket.offsets_elements, strict=True):
                name = parameter.name
                place = flat.as_strided(self._shapes[name], self._strides[name], offset)
                # No view to autograd, so that programs may call ``grad.detach_()``.
                self.places[name] = place.detach()
        self._addresses = [*map(_address_of, self.places.values())]

    def hold(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the buffer of this parameter's bucket."""
        place = self.places[name]
        return tensor is place or tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """How autograd lays out the gradients of a parameter: as it lies itself, if that is without gaps."""
    spec = TensorSpec.of(parameter)
    return spec.stride if spec.is_dense else contiguous_strides(spec.shape)
