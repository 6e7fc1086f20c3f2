"""Runs a captured graph with torch's own kernels and autograd: what a fault is bisected against first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def compile_graph(module: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The graph itself."""
    del examples
    return module
