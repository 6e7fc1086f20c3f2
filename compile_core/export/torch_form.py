"""An exported graph as ``torch.export.ExportedProgram``, for what takes those."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.export.structures import build


def to_torch(exported: Exported) -> ExportedProgram:
    """The same program as torch's exporter sees it: ATen operators, parameters under their names.

    Raises:
        Unsupported: sizes are open; torch's exporter does not keep them so through a call of this form.
        Exception: what ``torch.export.export`` raises.
    """
    if any(None in tensor.sizes for tensor in exported.arguments):
        raise Unsupported(
            "export-open-sizes",
            f"{exported.name} has open sizes, which are not converted",
            "export it without dynamic_shapes, or give the module to torch.export.export",
        )
    module = exported.module()
    device = next((tensor.device for tensor in exported.tensors.values()), torch.device(exported.device))
    tensors: list[Any] = []
    for tensor in exported.arguments:
        if tensor.same_as is None:
            made = torch.ones(tensor.example, dtype=tensor.torch_dtype, device=device)
            tensors.append(made.requires_grad_(tensor.requires_grad))
        else:
            tensors.append(tensors[tensor.same_as])
    args, kwargs = build(exported.call, tensors)
    return torch.export.export(module, args, kwargs, strict=False)
