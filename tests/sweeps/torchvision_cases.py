"""Every model builder of torchvision that takes images or videos and no targets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models

from tests.sweeps.cases import Case


def cases() -> list[Case]:
    """A case for each builder."""
    kinds: list[tuple[Any, Callable[[], dict[str, Any]]]] = [
        (models, lambda: {"x": torch.randn(2, 3, 224, 224)}),
        (models.segmentation, lambda: {"x": torch.randn(2, 3, 64, 64)}),
        (models.video, lambda: {"x": torch.randn(2, 3, 16, 112, 112)}),
        (
            models.optical_flow,
            lambda: {"image1": torch.randn(1, 3, 128, 128), "image2": torch.randn(1, 3, 128, 128)},
        ),
        (models.detection, lambda: {"images": [torch.randn(3, 64, 64)], "targets": [_target()]}),
    ]
    found = []
    for module, inputs in kinds:
        for name in models.list_models(module=module):
            family = f"{module.__name__} {re.split('[_0-9]', name)[0]}"
            found.append(
                Case(f"torchvision/{name}", family, lambda name=name, inputs=inputs: (_make(name), inputs()))
            )
    return found


def _make(name: str) -> nn.Module:
    settings = {} if name.startswith("raft") else {"weights_backbone": None}
    try:
        return models.get_model(name, weights=None, **settings)
    except (TypeError, ValueError):
        return models.get_model(name, weights=None)


def _target() -> dict[str, torch.Tensor]:
    box = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    return {
        "boxes": box,
        "labels": torch.tensor([1]),
        "masks": torch.zeros(1, 64, 64, dtype=torch.uint8),
        "keypoints": torch.ones(1, 17, 3),
    }
