"""The state of torch that every operation depends on, as one tuple that each check compares."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gradsplit.compile_core.capture.run_only import is_run_only
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.torch_facts.autograd_engine import top_transform
from gradsplit.compile_core.torch_facts.modules import GLOBAL_HOOK_TABLES
from gradsplit.compile_core.torch_facts.thread_state import (
    DeviceContext,
    deterministic_algorithms,
    deterministic_only_warns,
    function_mode_at,
    is_any_autocast_enabled,
    is_forward_mode,
    is_tracing,
    number_of_dispatch_modes,
    number_of_function_modes,
    pop_mode_temporarily,
)
from gradsplit.compile_core.torch_facts.torch_switches import (
    preserved_dispatch_keys,
    without_saved_tensor_hooks,
)
from gradsplit.compile_core.torch_facts.torchs_stance import stance

_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_get_default_dtype = torch.get_default_dtype
_functorch_stack = top_transform


@functools.cache
def _autocast_devices() -> frozenset[str]:
    """Not asked for by an import: it finds the GPUs, which then cannot be hidden any more, nor used by forks."""
    accelerator = torch.accelerator.current_accelerator()
    return frozenset({"cpu", "cuda"} if accelerator is None else {"cpu", "cuda", accelerator.type})


def global_state() -> tuple[Any, ...]:
    """Gradient, inference and autocast modes, default dtype and device, determinism, active modes, forward-mode
    gradients, global module hooks."""
    return (
        _is_grad_enabled(),
        _is_inference_mode_enabled(),
        _get_default_dtype(),
        is_any_autocast_enabled() and autocast_state(),
        deterministic_algorithms(),
        deterministic_only_warns(),
        number_of_function_modes() and (number_of_function_modes(), default_device()),
        number_of_dispatch_modes(),
        _functorch_stack() is None,
        is_forward_mode(),
        any(GLOBAL_HOOK_TABLES),
    )


def autocast_state() -> tuple[Any, ...]:
    """Whether autocast caches, where it is on, and its dtypes. While it is off, only who asks for a dtype reads it."""
    state: list[Any] = [torch.is_autocast_cache_enabled()]
    for name in _autocast_devices():
        state += (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
    return tuple(state)


def attention_kernels() -> tuple[Any, ...]:
    """Which kernels attention may use; read by graphs with attention only.

    Not their order of priority: torch changes it itself at the first choice between CUDA kernels, and it is only a
    preference among kernels of one meaning.
    """
    backends = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def default_device() -> torch.device | None:
    """The device of ``torch.set_default_device`` or ``with torch.device(...)``, where that is the only mode active.

    It is a mode that gives factory functions their ``device``; capture writes the device into the graph instead.
    """
    if number_of_function_modes() != 1:
        return None
    mode = function_mode_at(0)
    return mode.device if type(mode) is DeviceContext else None


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Fake tensors are made and traced outside inference mode, whose tensors have no version, on the devices that the
    graph says, and unseen by the program's saved-tensor hooks; grad mode stays."""
    grad_mode = torch.is_grad_enabled()
    no_device = nullcontext() if default_device() is None else pop_mode_temporarily()
    with (
        preserved_dispatch_keys(),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_mode),
        no_device,
        without_saved_tensor_hooks(),
    ):
        yield


def must_run_plain() -> bool:
    """Whether nothing may be captured: under ``run_only`` or torch's stance of that meaning, or where a mode is active
    under which torch calls mean something else (tracing, fake tensors, vmap, gradients in forward mode).

    Raises:
        CompileError: torch's stance asks for it.
    """
    if stance() == "fail_on_recompile":
        raise CompileError("a call would be compiled, and the stance is fail_on_recompile")
    if is_run_only() or stance() == "eager_on_recompile":
        return True
    modes = number_of_function_modes() and default_device() is None
    transformed = _functorch_stack() is not None or is_forward_mode()
    return bool(modes or number_of_dispatch_modes() or transformed or is_tracing())
