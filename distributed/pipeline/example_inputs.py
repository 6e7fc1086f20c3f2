"""What an exported graph is timed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.export.conditions import ExportedTensor
from gradsplit.compile_core.export.exported import Exported
from gradsplit.distributed.pipeline.call_arguments import read_call


def example_call(exported: Exported, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, by position among ``exported.arguments``; those that it lacks, or has in another size than
    was exported, are made.

    Those of the user tell the most: equal indices, for one, make the gradient of an embedding slow.
    """
    given = read_call(exported, args, kwargs)
    return [
        given[k] if k in given and given[k].shape == argument.example else made(argument, exported.device)
        for k, argument in enumerate(exported.arguments)
    ]


def made(argument: ExportedTensor, device: str) -> torch.Tensor:
    """A tensor as it was exported: zeros of integers, which are right for indices; else random numbers, since a GPU
    multiplies zeros faster."""
    tensor = torch.zeros(argument.example, dtype=argument.torch_dtype, device=device)
    if tensor.is_floating_point():
        tensor.normal_()
    return tensor.requires_grad_(argument.requires_grad)


def example_inputs(exported: Exported, call: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What its graph is called with: parameters, copies of buffers and constants, and the tensors of a call."""
    inputs: list[torch.Tensor] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        path = node.meta["path"]
        if node.meta["kind"] == "argument":
            inputs.append(call[path].detach().requires_grad_(exported.arguments[path].requires_grad))
        else:
            held = exported.tensors[path]
            inputs.append(held if isinstance(held, torch.nn.Parameter) else held.clone())
    return inputs
