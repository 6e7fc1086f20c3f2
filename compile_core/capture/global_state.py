"""The state of torch that every operation depends on, as one tuple that each check compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from compile_core.capture.modules import GLOBAL_HOOK_TABLES
from compile_core.capture.run_only import is_run_only

_is_grad_enabled = torch._C.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_get_default_dtype = torch.get_default_dtype
_is_autocast_enabled = torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype
_deterministic = torch._C._get_deterministic_algorithms
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_stack = peek_interpreter_stack
_is_tracing = torch._C._is_tracing


def global_state() -> tuple[Any, ...]:
    """Gradient, inference and autocast modes, default dtype, determinism, active modes, global module
    hooks."""
    return (
        _is_grad_enabled(),
        _is_inference_mode_enabled(),
        _get_default_dtype(),
        _is_autocast_enabled("cpu"),
        _is_autocast_enabled("cuda"),
        _get_autocast_dtype("cpu"),
        _get_autocast_dtype("cuda"),
        _deterministic(),
        _function_modes(),
        _dispatch_modes(),
        _functorch_stack() is None,
        any(GLOBAL_HOOK_TABLES),
    )


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Fake tensors are made and traced outside inference mode, whose tensors have no version; grad mode
    stays."""
    grad_mode = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        yield


def must_run_plain() -> bool:
    """Whether nothing may be captured: under ``run_only``, or where a mode is active under which torch calls mean
    something else (tracing, fake tensors, vmap)."""
    if is_run_only():
        return True
    return bool(_function_modes() or _dispatch_modes() or _functorch_stack() is not None or _is_tracing())
