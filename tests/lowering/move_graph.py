"""Graphs as they would be for a GPU, made where there is none: torch without CUDA cannot run all of its Python on fake
CUDA tensors, so graphs are recorded for the CPU and then say that they are for a GPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

GPU = torch.device("cuda", 0)


def on_gpu(
    module: torch.fx.GraphModule, nodes: Collection[torch.fx.Node] | None = None
) -> torch.fx.GraphModule:
    """Changes a recorded graph of CPU tensors into one of GPU tensors, or these of its nodes, and returns it."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    with FakeTensorMode():
        for node in module.graph.nodes if nodes is None else nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
    module.recompile()
    return module
