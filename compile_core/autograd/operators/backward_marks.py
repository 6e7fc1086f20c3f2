"""Which operators of a joint graph the backward recorded.

Most are known by their operands, which depend on a gradient that arrives. Of one without operands, as of
``torch.rand(n)`` in the backward of a function of the user's own, only the mark tells.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.fx import Node
from torch.fx import traceback as node_metadata

_MARK = "of_backward"


def marked_as_backward() -> AbstractContextManager[None]:
    """Operators that are recorded inside, under ``torch.fx.traceback.preserve_node_meta``, carry the mark."""
    return node_metadata.annotate({_MARK: True})


def mark_as_backward(node: Node) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: True}


def is_of_backward(node: Node) -> bool:
    return bool(node.meta.get("custom", {}).get(_MARK))
