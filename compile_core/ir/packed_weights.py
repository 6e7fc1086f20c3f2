"""Weights in the layouts that oneDNN's kernels read, as operators of joint graphs.

Given a weight as torch lays it out, oneDNN turns it into its own layout in each call, which for the last convolutions
of a network takes as long as the convolution of one image. A packed weight is opaque, and nothing but ``CONVOLUTION``
or ``LINEAR`` reads it; to graphs it is the weight that it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("gradsplit", "FRAGMENT")
_library.define(
    "packed_weight(Tensor weight, int[] padding, int[] stride, int[] dilation, int groups, int[]? size) -> Tensor"
)
_library.define("packed_matrix(Tensor weight, int? rows) -> Tensor")


def _packed_weight(
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    size: Sequence[int] | None,
) -> Tensor:
    """``size`` is that of the images for which the layout is chosen; it is right for others."""
    return torch.ops.mkldnn._reorder_convolution_weight(weight, padding, stride, dilation, groups, size)


def _packed_matrix(weight: Tensor, rows: int | None) -> Tensor:
    """``rows`` is the number of rows of the product for which the layout is chosen; it is right for others."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)


_library.impl("packed_matrix", _packed_matrix, "CPU")
torch.library.register_fake(
    "gradsplit::packed_matrix", lambda weight, rows: weight.new_empty(weight.shape), lib=_library
)
_library.impl("packed_weight", _packed_weight, "CPU")
torch.library.register_fake(
    "gradsplit::packed_weight", lambda weight, *rest: torch.empty_like(weight), lib=_library
)

PACKED_WEIGHT: Any = torch.ops.gradsplit.packed_weight.default
PACKED_MATRIX: Any = torch.ops.gradsplit.packed_matrix.default
PACKINGS = (PACKED_WEIGHT, PACKED_MATRIX)
CONVOLUTION: Any = None
LINEAR: Any = None
if torch.backends.mkldnn.is_available():
    # Both take an element-wise function to be done on the result, with its numbers and its variant, after what is
    # listed: images, packed weight, bias, padding, stride, dilation, groups; and rows, packed matrix, bias.
    CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default
    LINEAR = torch.ops.mkldnn._linear_pointwise.default


def has_bfloat16_kernels() -> bool:
    """Whether oneDNN computes with bfloat16 on this machine."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
