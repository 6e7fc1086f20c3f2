"""Calls of modules with hooks: torch's own code runs the hooks, and only the ``forward`` between them is compiled.

Hooks of the backward are put on autograd's graph round the call, where no capture can follow. So the frame of
``torch.nn.Module._call_impl`` stays plain Python, in which the one callee that is the module's ``forward`` is replaced.
Hooks hence get the arguments as the caller wrote them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from gradsplit.compile_core.compiled_calls.plain_frames import PlainFrames
from gradsplit.compile_core.torch_facts.modules import GLOBAL_HOOK_TABLES, call_with_hooks


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module is more than its ``forward``. Called at each call, so it loops over nothing."""
    of_module = module.__dict__.get
    return bool(
        of_module("_forward_hooks")
        or of_module("_forward_pre_hooks")
        or of_module("_backward_hooks")
        or of_module("_backward_pre_hooks")
        or any(GLOBAL_HOOK_TABLES)
    )


class HookedCalls:
    """Calls modules that share a ``forward``, with their hooks.

    Args:
        forward: its code.
        compiled_form: the compiled form of a bound ``forward``.
    """

    def __init__(
        self, forward: types.CodeType, compiled_form: Callable[[types.MethodType], Callable[..., Any]]
    ) -> None:
        self.forward = forward
        self._compiled_form = compiled_form
        frames = PlainFrames(self._form_of, inner_functions=True)
        self._call: Callable[..., Any] = frames.form_of(call_with_hooks)

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._call(module, *args, **kwargs)

    def _form_of(self, callee: Any) -> Any:
        if isinstance(callee, types.MethodType) and getattr(callee, "__code__", None) is self.forward:
            return self._compiled_form(callee)
        return callee
