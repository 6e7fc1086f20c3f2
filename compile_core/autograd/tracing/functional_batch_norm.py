"""Teaches functionalization that batch normalisation changes its running statistics, which two old schemas do not say.

``native_batch_norm`` and ``cudnn_batch_norm`` count as pure operators, so their changes of ``running_mean`` and
``running_var`` would be lost. At the functionalization key both become ``_native_batch_norm_legit``, which says so.
cuDNN's operator for the backward becomes the native one, which reads the same saved statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_library = torch.library.Library("aten", "IMPL")  # holds the registrations for as long as the module lives

Statistics = torch.Tensor | None


def _native_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: Statistics,
    running_var: Statistics,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if running_mean is None or running_var is None:
        return aten._native_batch_norm_legit.no_stats(tensor, weight, bias, training, momentum, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training(
            tensor, weight, bias, running_mean, running_var, momentum, eps
        )
    return aten._native_batch_norm_legit(
        tensor, weight, bias, running_mean, running_var, training, momentum, eps
    )


def _cudnn_batch_norm(tensor: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, ...]:
    result, mean, inverse_deviation = _native_batch_norm(tensor, *settings)
    # cuDNN keeps private notes for its own backward, which is not called.
    return result, mean, inverse_deviation, tensor.new_empty((0,), dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    running_mean: Statistics,
    running_var: Statistics,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    eps: float,
    _notes: torch.Tensor,
) -> Any:
    statistics = (running_mean, running_var, mean, inverse_deviation)
    wanted = [True, True, True]
    return aten.native_batch_norm_backward(gradient, tensor, weight, *statistics, True, eps, wanted)


_library.impl("native_batch_norm", _native_batch_norm, "Functionalize")
_library.impl("cudnn_batch_norm", _cudnn_batch_norm, "Functionalize")

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward
}
