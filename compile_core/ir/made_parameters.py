"""Parameters that a program makes, as nodes of a graph."""

from __future__ import annotations

import torch

from gradsplit.compile_core.torch_facts.dispatcher import is_functional


def made_parameter(data: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """``torch.nn.Parameter`` of a tensor. In a trace it is a leaf of the class that is traced with, since a parameter
    would be one beside the trace."""
    if type(data) in (torch.Tensor, torch.nn.Parameter) and not is_functional(data):
        return torch.nn.Parameter(data, requires_grad)
    return data.detach().requires_grad_(requires_grad)
