"""Which checkpoint of the program an operator of the joint graph lies in, and what is ordered about it.

``recompute_regions`` makes the marks while the program is traced. What rewrites the graph keeps them, and the partition
takes its orders from them (``recompute_orders``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.fx import Node
from torch.fx import traceback as node_metadata
from torch.utils.checkpoint import CheckpointPolicy

_MARK = "recompute_region"


@dataclass
class RegionMark:
    """What an operator of the traced program carries that lies in a checkpoint.

    Attributes:
        region: the checkpoint's number.
        keeps_random_state: whether its recomputation sees the same random numbers.
        operator: under a policy, the number of the program's operator that the traced one is part of.
        policy: what the policy said of that operator; of the whole region where there is no policy.
    """

    region: int
    keeps_random_state: bool
    operator: int | None = None
    policy: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE


def mark_of(node: Node) -> RegionMark | None:
    """The mark of an operator of the traced program; ``None`` outside of all checkpoints."""
    return node.meta.get("custom", {}).get(_MARK)


def marked(mark: RegionMark) -> AbstractContextManager[None]:
    """Operators that are recorded inside, under ``torch.fx.traceback.preserve_node_meta``, carry the mark."""
    return node_metadata.annotate({_MARK: mark})


def is_marking() -> bool:
    """Whether what is recorded now lies in a checkpoint."""
    return _MARK in node_metadata.current_meta.get("custom", {})
