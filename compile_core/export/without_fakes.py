"""Calls with fake tensors, as calls with tensors on the meta device: a capture takes those, and computes nothing
either."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


def without_fakes(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """The call with meta tensors in the place of fake ones, and the type of device that fake ones had."""
    memo: dict[int, Any] = {}
    devices: set[str] = set()

    def note(tensor: Any) -> None:
        if isinstance(tensor, FakeTensor):
            devices.add(tensor.device.type)
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(made, tensor.requires_grad)
                if is_parameter
                else made.requires_grad_(tensor.requires_grad)
            )
        else:
            memo[id(tensor)] = tensor

    callee, *given = call
    modules = list(callee.modules()) if isinstance(callee, nn.Module) else []
    for module in modules:
        for held in (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()):
            if isinstance(held, torch.Tensor):
                note(held)
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            note(leaf)
    if not devices:
        return call, ""
    if len(devices) > 1:
        raise ValueError(f"fake tensors of one device are exported, not of {' and '.join(sorted(devices))}")
    return copy.deepcopy(call, memo), devices.pop()
