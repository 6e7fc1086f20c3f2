"""Checkpoints of a pipeline: those of stages make one of the whole model, which other stages can load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from gradsplit.distributed.pipeline.export_folder import read_layout


def merge_checkpoints(
    path: str | os.PathLike[str], state_dicts: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The ``state_dict`` of the whole model, of those of all stages of a pipeline.

    Args:
        path: the folder of the exported pipeline.
        state_dicts: of its stages, in any order.

    Raises:
        ValueError: stages are missing, or have different values for a buffer that they share.
    """
    layout, _ = read_layout(path)
    merged: dict[str, torch.Tensor] = {}
    for state in state_dicts:
        for name, tensor in state.items():
            if name in merged and not torch.equal(merged[name], tensor):
                raise ValueError(f"stages have different values for {name}; they are not of one step")
            merged[name] = tensor
    unknown = [name for name in merged if name not in layout.state_names]
    missing = [name for name in layout.state_names if name not in merged]
    if unknown or missing:
        what = f"{missing[0]} is in none of them" if missing else f"{unknown[0]} is no part of {layout.name}"
        raise ValueError(
            f"{len(state_dicts)} checkpoints do not make a whole {layout.name} of {len(layout.stages)} stages: {what}"
        )
    return {name: merged[name] for name in layout.state_names}
