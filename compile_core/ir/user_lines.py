"""The user's lines that a graph's nodes come from."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.fx import Node

from gradsplit.compile_core.errors import CodeLocation

_PLACE = re.compile(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)')


def stack_of(node: Node) -> list[CodeLocation]:
    """The lines of all calls that lead to a node, outermost first; none where they are not known."""
    found = _PLACE.findall(node.meta.get("stack_trace", ""))
    return [CodeLocation(file, int(line), function, text) for file, line, function, text in found]


def innermost_lines(nodes: Iterable[Node]) -> list[CodeLocation]:
    """The innermost line of each node that has one, each once, in order."""
    return list(dict.fromkeys(stack[-1] for node in nodes if (stack := stack_of(node))))
