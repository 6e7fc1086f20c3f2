"""The user's lines that a graph's nodes come from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import torch
from torch.fx import Node

from gradsplit.compile_core.errors import CodeLocation

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_PLACE = re.compile(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)')


def is_users_file(filename: str) -> bool:
    """Whether code of this file is no part of torch."""
    return not filename.startswith(_TORCH)


def stack_of(node: Node) -> list[CodeLocation]:
    """The lines of all calls that lead to a node, outermost first; none where they are not known."""
    found = _PLACE.findall(node.meta.get("stack_trace", ""))
    return [CodeLocation(file, int(line), function, text) for file, line, function, text in found]


def user_line(node: Node) -> CodeLocation | None:
    """The innermost line outside of torch's own files that leads to a node, since ``nn.Linear``'s says little of a
    program; torch's where all are; ``None`` where none is known."""
    stack = stack_of(node)
    own = [place for place in stack if is_users_file(place.filename)]
    return (own or stack or [None])[-1]


def user_lines(nodes: Iterable[Node]) -> list[CodeLocation]:
    """The line of each node that has one, each once, in order."""
    return list(dict.fromkeys(place for node in nodes if (place := user_line(node)) is not None))
