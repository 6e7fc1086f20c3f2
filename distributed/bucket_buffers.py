"""The memory of a bucket plan: one flat buffer a bucket, and the place of every gradient in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bucketing.bucket import BucketPlan


class BucketBuffers:
    """Buffers filled with zeros, so that the padding between gradients reduces to zero.

    Attributes:
        plan: what they were made for.
        flat: the buffer of each bucket, one-dimensional.
        places: by parameter, its gradient's part of a buffer, laid out as autograd lays out that parameter's gradients.
        bucket_of: by parameter, the index of its bucket.
    """

    def __init__(self, plan: BucketPlan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.plan = plan
        self.flat: list[torch.Tensor] = []
        self.places: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        for bucket in plan.buckets:
            like = parameters[bucket.parameters[0].name]
            flat = torch.zeros(bucket.numel, dtype=like.dtype, device=like.device)
            self.flat.append(flat)
            for parameter, offset in zip(bucket.parameters, bucket.offsets_elements, strict=True):
                self.places[parameter.name] = _place(flat, offset, parameters[parameter.name])
                self.bucket_of[parameter.name] = bucket.index

    def hold(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the buffer of this parameter's bucket."""
        place = self.places[name]
        return tensor is place or tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()


def _place(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient has the strides of its parameter, without gaps."""
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), offset)
