"""One model of each module of timm, the smallest by its name."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn

from tests.sweeps.cases import Case

_SIDE, _CLASSES = 64, 10
_SMALL = ("test", "nano", "pico", "atto", "micro", "tiny", "xxs", "small", "18", "b0")


def cases() -> list[Case]:
    """A case for each module of ``timm.models``."""
    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            name = min(names, key=lambda name: (not any(word in name for word in _SMALL), len(name), name))
            found.append(Case(f"timm/{name}", module, lambda name=name: _make(name)))
    return found


def _make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    settings = {"num_classes": _CLASSES, "drop_path_rate": 0.1}
    for given in (settings | {"img_size": _SIDE}, settings, {"num_classes": _CLASSES}):
        try:
            model = timm.create_model(name, pretrained=False, **given)
            break
        except (TypeError, AssertionError, ValueError, RuntimeError):
            continue
    else:
        model = timm.create_model(name, pretrained=False)
    side = _SIDE if "img_size" in given else model.default_cfg["input_size"][-1]
    return model, {"x": torch.randn(2, 3, side, side)}
