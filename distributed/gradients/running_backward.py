"""What autograd's engine tells of the backward that runs. torch exports these functions without declaring them."""

from __future__ import annotations

from typing import Any

import torch

# Whether it will run a node, or has; only called in a backward. It does not count the node of the one tensor that the
# backward is for, such as a loss that a program computes: that one is current when it is asked for.
will_run: Any = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
current_node: Any = torch._C._current_autograd_node  # type: ignore[attr-defined]
# The backward's number; -1 outside of one.
backward_number: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]
