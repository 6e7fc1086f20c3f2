"""Tensors of one number on the CPU that a graph's kernels on a GPU read: compiled as if they lay on the GPU.

Torch takes such a tensor beside those of a GPU, as a learning rate, a scale or a temperature. A CUDA graph cannot: it
would have the number of the call in which it was recorded. So the number is put into a tensor on the GPU before each
call, by a kernel that takes it as its argument (``bound_graphs.moved_scalars``).

Left alone are scalars with gradients, and those that anything reads whose result is not on the GPU: what is computed on
the CPU, views of them, changes in place, results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def host_scalars(module: GraphModule, examples: Sequence[Any]) -> dict[int, Tensor]:
    """Positions of such inputs, with fake tensors on the GPU to take their places."""
    devices = {example.device for example in examples if isinstance(example, Tensor) and example.is_cuda}
    if len(devices) != 1:
        return {}
    (device,) = devices
    placeholders = module.graph.find_nodes(op="placeholder")
    return {
        position: _on(device, example)
        for position, (node, example) in enumerate(zip(placeholders, examples, strict=True))
        if _is_scalar(example) and node.users and all(_is_on(device, user) for user in node.users)
    }


def _is_scalar(example: Any) -> bool:
    return (
        isinstance(example, Tensor)
        and example.device.type == "cpu"
        and example.dim() == 0
        and example.layout is torch.strided
        and not example.requires_grad
    )


def _is_on(device: torch.device, node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op != "output" and isinstance(value, Tensor) and value.device == device


def _on(device: torch.device, example: Any) -> Tensor:
    with example.fake_mode:
        return torch.empty((), dtype=example.dtype, device=device)
