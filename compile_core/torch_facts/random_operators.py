"""Which operators draw random numbers."""

from __future__ import annotations

import torch
from torch.fx import Node


def is_random(node: Node) -> bool:
    """Whether the node moves a generator; attention without dropout does not, though its operator can."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) != 0)
    return True
