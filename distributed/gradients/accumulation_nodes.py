"""Where autograd's engine accumulates the gradients of parameters, and who else has hooks there.

A gradient that a compiled program stores never comes there, so hooks of the program's would silently not be called: the
gradients of parameters with hooks come through the engine. Hooks may be the parameter's own (``register_hook``,
``register_post_accumulate_grad_hook``) or the node's, as code that shards parameters has them. Torch does not list a
node's hooks, but all that Python has registered are in one dictionary, which whoever registers one is given.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

# The parameter's own.
_hooks = operator.attrgetter("_backward_hooks")
_hooks_after = operator.attrgetter("_post_accumulate_grad_hooks")


class _OwnHook(functools.partial[None]):
    """A hook of ours."""


class AccumulationNodes:
    """The nodes of some parameters, with hooks that run when the engine reaches them.

    Args:
        reached: a method, called before a gradient is accumulated.
        accumulated: one called afterwards with the name, before all other hooks on the node, as stock DDP's are.

    All compiled forms of a module share the nodes: hooks do not keep the methods' objects alive, and go with this one.

    Attributes:
        by_name: the nodes.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        reached: Callable[..., None],
        accumulated: Callable[..., None],
    ) -> None:
        self._parameters = parameters
        # Nobody else keeps these alive, and hooks go with them.
        self.by_name: dict[str, Any] = {name: node_of(parameter) for name, parameter in parameters.items()}
        handles: list[Any] = []
        of_accumulated = weakref.WeakMethod(accumulated)
        for name, node in self.by_name.items():
            before = call_before(node, reached)
            after = node.register_hook(_OwnHook(_call_if_alive, of_accumulated, name))
            put_first(after)
            handles += [before, after]
        self._hooks: list[Mapping[int, Any]] = [handle.hooks_dict_ref() for handle in handles]
        remove_with(self, handles)

    def hooked(self) -> frozenset[str]:
        """The names of parameters that have hooks of the program's."""
        # Looked at in every step: as a rule there are none, and one of ours in each.
        tensors = self._parameters.values()
        is_plain = sum(map(len, self._hooks)) == len(self._hooks)
        if is_plain and not any(map(_hooks, tensors)) and not any(map(_hooks_after, tensors)):
            return frozenset()
        of_nodes = zip(self._hooks[::2], self._hooks[1::2], strict=True)
        return frozenset(
            name
            for (name, tensor), both in zip(self._parameters.items(), of_nodes, strict=True)
            if _hooks(tensor)
            or _hooks_after(tensor)
            or not all(isinstance(hook, _OwnHook) for hooks in both for hook in hooks.values())
        )


def hooks_came_late(what: str) -> str:
    """The error of parameters that got hooks after the forward, where the engine has a part of their gradients and
    compiled programs another: no hook would see the sum."""
    return (
        f"{what} got a hook between the forward and the backward of a compiled DistributedDataParallel module, and is "
        f"used both in a compiled graph and outside of any: register the hook before the forward"
    )


def call_before(node: Any, method: Callable[..., None], *arguments: Any) -> Any:
    """Has a method called, with these arguments and the gradients, before the engine runs ``node``. Its object is not
    kept alive."""
    return node.register_prehook(_OwnHook(_call_if_alive, weakref.WeakMethod(method), *arguments))


def remove_with(owner: object, handles: Iterable[Any]) -> None:
    """These hooks go with ``owner``."""
    weakref.finalize(owner, _remove, handles).atexit = False


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    living = method()
    if living is not None:
        living(*arguments)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def node_of(parameter: torch.nn.Parameter) -> Any:
    """Where the engine accumulates its gradient."""
    # In inference mode nothing has a node.
    with torch.inference_mode(False):
        if parameter.requires_grad:  # torch.func refuses even a request that changes nothing
            return get_gradient_edge(parameter).node
        try:
            # It is frozen for now.
            return get_gradient_edge(parameter.requires_grad_()).node
        finally:
            parameter.requires_grad_(False)


def put_first(handle: Any) -> None:
    """Has a hook of a node called before all others of its kind that Python has registered there."""
    hooks = handle.hooks_dict_ref()
    # Torch calls them in the order in which they were put in, whatever order an ``OrderedDict`` has of its own.
    others = {key: hook for key, hook in hooks.items() if key != handle.id}
    for key in others:
        del hooks[key]
    hooks.update(others)
