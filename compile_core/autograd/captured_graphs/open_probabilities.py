"""Random operators whose probability is known only when the graph runs, as comparisons of uniform numbers.

Torch's own ask whether the number is a probability, which the trace cannot answer. That it lies between 0 and 1 is a
guard of the capture. The results have the distribution of torch's operators, not their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from gradsplit.compile_core.autograd.captured_graphs.replace_calls import replace_each


def draw_uniform(module: GraphModule) -> GraphModule:
    """The captured graph without such operators; ``module`` itself stays as it is."""
    return replace_each(module, _replacement)


def _replacement(node: Node) -> Callable[..., Tensor] | None:
    if not any(isinstance(source.meta.get("example_value"), float) for source in node.all_input_nodes):
        return None
    found = _OPERATORS.get(node.target) if node.op == "call_function" else _METHODS.get(str(node.target))
    return found if node.op in ("call_function", "call_method") else None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training:
        return input
    kept = torch.rand_like(input, dtype=torch.float32) < 1 - p
    result = input * kept * (1 / (1 - p))
    return input.copy_(result) if inplace else result


def _bernoulli_(self: Tensor, p: float) -> Tensor:
    return self.copy_(torch.rand_like(self, dtype=torch.float32) < p)


def _bernoulli(self: Tensor, p: float) -> Tensor:
    return (torch.rand_like(self, dtype=torch.float32) < p).to(self.dtype)


_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    torch.bernoulli: _bernoulli,
}
_METHODS: dict[str, Callable[..., Tensor]] = {"bernoulli_": _bernoulli_, "bernoulli": _bernoulli}
