"""What a node of a captured graph holds, where passes may reason about its sizes and its memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, strided
from torch.fx import Node

from gradsplit.compile_core.ir.tensor_spec import TensorSpec


def static_tensor(given: Any) -> Tensor | None:
    """The fake tensor that a node holds, if it has strides and all its sizes are known."""
    example = given.meta.get("example_value") if isinstance(given, Node) else None
    if not isinstance(example, Tensor) or example.layout is not strided:
        return None
    return None if TensorSpec.of(example).is_open else example


def unchanged_tensor(given: Any) -> Tensor | None:
    """The same if nothing changes it in place."""
    example = static_tensor(given)
    return example if example is not None and is_unchanged(example) else None


def is_unchanged(example: Tensor) -> bool:
    """Whether nothing changes it in place, as far as is known: tensors of inference mode count no versions."""
    return not example.is_inference() and example._version == 0
