"""Structured steps of random programs: checkpoints, branches that data decide, functions with their own backward."""

from __future__ import annotations

import functools
import io
import operator
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gradsplit.compile_core.ir import control_flow, higher_order


def _body(function: Callable[..., Any]) -> torch.fx.GraphModule:
    """A body as capture makes it: a graph that returns a tuple."""
    return torch.fx.symbolic_trace(lambda x, y: (function(x, y),))


@dataclass(frozen=True)
class Region:
    """A step on two tensors whose operations lie in bodies.

    Attributes:
        name: of the step, and of what the graph holds for it.
        call: what the captured graph calls; it takes the held objects, then the tensors.
        held: bodies and options.
        decides: the first tensor's sum decides and comes before the held objects.
    """

    name: str
    call: Callable[..., Any]
    held: tuple[Any, ...]
    decides: bool = False

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = [_decide(x)] if self.decides else []
        with redirect_stderr(io.StringIO()):  # graphs print what they raise, as where the shapes do not fit
            for branch in self.held if self.decides else ():
                branch(x.detach(), y.detach())
            return self.call(*first, *self.held, x, y)[0]

    def emit(
        self, root: torch.nn.Module, graph: torch.fx.Graph, x: torch.fx.Node, y: torch.fx.Node
    ) -> torch.fx.Node:
        names = [f"{self.name}_{position}" for position in range(len(self.held))]
        for name, value in zip(names, self.held, strict=True):
            setattr(root, name, value)
        first = [graph.call_function(_decide, (x,))] if self.decides else []
        called = graph.call_function(self.call, (*first, *map(graph.get_attr, names), x, y))
        return graph.call_function(operator.getitem, (called, 0))


def _decide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sum() > 0


def _checkpoint(name: str, function: Callable[..., Any], **keywords: Any) -> Region:
    options = higher_order.CheckpointOptions({"use_reentrant": False, **keywords}, num_arguments=2)
    return Region(name, higher_order.checkpoint, (_body(function), options))


def _branch(name: str, on_true: Callable[..., Any], on_false: Callable[..., Any]) -> Region:
    return Region(name, control_flow.cond, (_body(on_true), _body(on_false)), decides=True)


def _product(x: Any, y: Any) -> Any:
    return ((x @ y).sin() * y).sigmoid()


def _changes_inside(x: Any, y: Any) -> Any:
    z = x.sin()
    z.mul_(y)
    return z.exp().t()


def _nested() -> Region:
    """A checkpoint whose body ends in another one."""
    inner = _checkpoint("inner", _product)
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((inner.emit(root, graph, graph.call_method("sin", (x,)), y),))
    options = inner.held[1]
    return Region("nested", higher_order.checkpoint, (torch.fx.GraphModule(root, graph), options))


_products_saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

REGIONS = [
    _checkpoint("product", _product),
    _checkpoint("changes", _changes_inside),
    _checkpoint("dropout", lambda x, y: F.dropout(x * y, 0.5).sin() * x),
    _checkpoint("passes_on", lambda x, y: x),
    _checkpoint("view", lambda x, y: (x * y).t()),
    _checkpoint("policy", lambda x, y: _product(_product(x, y), y), context_fn=_products_saved),
    _nested(),
    _branch("branch", lambda x, y: x * y, lambda x, y: x.sin() + y),
    _branch("one_sided", lambda x, y: x @ y, lambda x, y: x * 2),
]


class _TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return gradient * (x.cos() + y)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class _Secondary(torch.autograd.Function):
    """The first of two results takes no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = x.argsort(0)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(y)
        return order, x * y

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y, gradient if ctx.needs_input_grad[1] else None


def twice_the_gradient(x: torch.Tensor) -> torch.Tensor:
    return _TwiceTheGradient.apply(x)  # type: ignore[return-value]


def reversed_gradient(x: torch.Tensor) -> torch.Tensor:
    return _Reversed.apply(x)  # type: ignore[return-value]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return _Doubled.apply(x)  # type: ignore[return-value]


def secondary_result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _Secondary.apply(x, y)[1]  # type: ignore[index]


def new_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()
