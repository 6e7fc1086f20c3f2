"""What a call in a captured graph is of, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node


def call_name(node: Node) -> str:
    """Of the function or method; empty for what has none."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def call_arguments(node: Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments by their names, of which the first are given."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
