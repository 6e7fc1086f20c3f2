"""Hooks of tensors to which no gradient comes, which plain PyTorch does not call.

The engine calls the hooks of all results of a node when a gradient comes to any of them, and those of all that the node
leads to; to autograd a compiled graph is one node. Where there is no gradient, it calls them with ``None``. Limit: so
it does for hooks of what plain operators have computed before a graph whose results are not separate; see
``DifferentiableProgram.separate``.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

Hook = Callable[[Any], Any]


class HooksOfResult(OrderedDict[int, Hook]):
    """The hooks of a tensor by their handles, where autograd and ``register_hook`` look for them."""

    def __setitem__(self, handle: int, hook: Hook) -> None:
        super().__setitem__(handle, _only_with_gradient(hook))

    @staticmethod
    def of(tensor: torch.Tensor) -> HooksOfResult:
        return HooksOfResult(tensor._backward_hooks or {})


def spare_leaves(node: Any, edges: Iterable[int]) -> None:
    """The hooks of leaves to which these edges of a node lead are not called where no gradient comes."""
    functions = node.next_functions
    for edge in edges:
        leaf = getattr(functions[edge][0], "variable", None)
        hooks: Any = None if leaf is None else leaf._backward_hooks
        if hooks:
            hooks.update({handle: _only_with_gradient(hook) for handle, hook in hooks.items()})


class _OnlyWithGradient:
    def __init__(self, hook: Hook) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else self.hook(gradient)


def _only_with_gradient(hook: Hook) -> Hook:
    # Torch's hook for several tensors counts how many of them the engine has come to, with a gradient or not.
    counts = getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")
    return hook if counts or isinstance(hook, _OnlyWithGradient) else _OnlyWithGradient(hook)
