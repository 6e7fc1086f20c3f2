"""What autograd's engine tells of the backward that runs. torch exports these functions without declaring them."""

from __future__ import annotations

from typing import Any

import torch

# The backward's number; -1 outside of one.
backward_number: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_is_ahead: Any = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
_current_node: Any = torch._C._current_autograd_node  # type: ignore[attr-defined]


def will_run(node: Any) -> bool:
    """Whether the backward has or had the node to run; only called in a backward.

    The engine does not count the node of the one tensor that the backward is for, such as a loss that a program
    computes. All that asks for that node does so while it runs.
    """
    return _is_ahead(node) or _current_node() is node
