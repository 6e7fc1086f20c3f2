"""``one_hot`` of a known number of classes is one operator in a trace.

On a CPU torch reads the least and the greatest class before it writes: it raises for one that is out of range. A trace
has no classes to read. The operator does as torch does when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

_library = torch.library.Library("gradsplit", "FRAGMENT")
_library.define("one_hot(Tensor classes, SymInt count) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("one_hot", lambda classes, count: one_hot(classes, count), "CPU")
_library.impl("one_hot", lambda classes, count: classes.new_empty((*classes.shape, count)), "Meta")


def counted_classes() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """What to trace in the place of torch's function."""
    return {one_hot: _one_hot}


def _one_hot(classes: Tensor, num_classes: Any = -1) -> Tensor:
    if classes.device.type != "cpu" or (isinstance(num_classes, int) and num_classes < 0):
        return one_hot(classes, num_classes)
    return torch.ops.gradsplit.one_hot.default(classes, num_classes)
