"""Switches of torch: settings of the whole process that a program turns and turns back; how each is read and set.

A captured graph turns them by nodes. Whoever runs or traces a graph that may stop between two such nodes keeps them
with ``preserved_switches``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.torch_facts.autograd_engine import (
    allow_saved_tensors_hooks,
    refuse_saved_tensors_hooks,
    set_saved_tensors_hooks_tracing,
    top_saved_tensors_hooks,
    why_no_saved_tensors_hooks,
)
from gradsplit.compile_core.torch_facts.dispatcher import ForceDispatchKeyGuard, excluded_keys, included_keys
from gradsplit.compile_core.torch_facts.private_parts import private
from gradsplit.compile_core.torch_facts.thread_state import (
    fp32_precision_getter,
    fp32_precision_setter,
    set_default_dtype,
)

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Switch:
    """``get(*prefix)`` reads it, ``set(*prefix, *values)`` turns it; ``get`` gives one value or their tuple.

    ``concerns_kernels`` says that it sets how torch's kernels compute, not which of them the program calls.
    """

    get: Callable[..., Any]
    set: Callable[..., Any]
    prefix: tuple[Any, ...] = ()
    concerns_kernels: bool = False

    def read(self) -> tuple[Any, ...]:
        found = self.get(*self.prefix)
        return found if isinstance(found, tuple) else (found,)

    def turn(self, values: tuple[Any, ...]) -> None:
        self.set(*self.prefix, *values)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def refuse_hooks_for(reason: str | None) -> None:
    """From now on hooks for what autograd saves may not be set, with this message; None: they may."""
    if reason is None:
        allow_saved_tensors_hooks()
    else:
        refuse_saved_tensors_hooks(reason)


_PAIRS = [
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
    ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_onednn_allow_tf32", "_set_onednn_allow_tf32"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
]


def _pairs() -> Iterator[tuple[str, Any, Any]]:
    """Each setter's name, the getter, and the setter; ``False`` for what this torch does not have."""
    for names in _PAIRS:
        get, put = (
            private(
                f"torch._C:{name}", "a guard: switches of torch's kernels", "torch has no such switch", False
            )
            for name in names
        )
        yield names[1], get, put


SWITCHES: tuple[Switch, ...] = (
    Switch(torch.get_default_dtype, set_default_dtype),
    Switch(_anomaly, torch.set_anomaly_enabled),
    Switch(why_no_saved_tensors_hooks, refuse_hooks_for),
    *(Switch(get, put, concerns_kernels="_sdp_" not in name) for name, get, put in _pairs() if get and put),
    *(
        Switch(
            fp32_precision_getter,
            fp32_precision_setter,
            (backend, "all"),
            concerns_kernels=True,
        )
        for backend in ("cuda", "mkldnn")
        if fp32_precision_getter and fp32_precision_setter
    ),
)


def read_switches() -> tuple[tuple[Any, ...], ...]:
    """The settings of all switches."""
    return tuple(switch.read() for switch in SWITCHES)


def turn_back(settings: tuple[tuple[Any, ...], ...]) -> None:
    """Give all switches the settings that ``read_switches`` returned."""
    for switch, before in zip(SWITCHES, settings, strict=True):
        if switch.read() != before:
            switch.turn(before)


def _autocast_depth() -> int:
    """How many autocast regions are open. It stays as it is: the end of the outermost drops the weights cast in it."""
    deeper = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return deeper - 1


@dataclass(frozen=True)
class TorchModes:
    """Grad mode, autocast and all switches, as they were at one time."""

    grad_enabled: bool
    autocast_cache_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    switches: tuple[tuple[Any, ...], ...]

    @staticmethod
    def now() -> TorchModes:
        return TorchModes(
            torch.is_grad_enabled(),
            torch.is_autocast_cache_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST_DEVICES
            ),
            read_switches(),
        )

    def turn_on(self) -> None:
        """Make them torch's modes."""
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache_enabled)
        turn_back(self.switches)
        torch.set_grad_enabled(self.grad_enabled)


@contextmanager
def preserved_switches() -> Iterator[None]:
    """Torch's modes are afterwards as before, whatever stops in between."""
    before = TorchModes.now()
    depth = _autocast_depth()
    try:
        yield
    finally:
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        before.turn_on()


@contextmanager
def preserved_dispatch_keys() -> Iterator[None]:
    """Which of torch's keys a call is dispatched to is afterwards as before, in this thread."""
    included, excluded = included_keys(), excluded_keys()
    with ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except Exception as error:
            free_guards(error)
            raise


def free_guards(error: BaseException) -> None:
    """Ends what torch holds in the frames that an error left: guards of dispatch keys, which put back what they found.

    Frames live as long as their error does. Freed with it, such guards of nested transforms of ``torch.func`` would
    put back keys that have autograd excluded, when nothing is left to put right what they do.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast on any device, as where a backward runs."""
    enabled = [(device, torch.is_autocast_enabled(device)) for device in _AUTOCAST_DEVICES]
    for device, _ in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device, was_enabled in enabled:
            torch.set_autocast_enabled(device, was_enabled)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """The hooks of ``torch.autograd.graph.saved_tensors_hooks`` are for the program's tensors, not for the fake ones
    that a capture or a trace computes with."""
    before = set_saved_tensors_hooks_tracing(True)
    try:
        yield
    finally:
        set_saved_tensors_hooks_tracing(before)


def saved_tensor_hooks_are_active() -> bool:
    """Whether the program has hooks for what autograd saves, at this place of this thread."""
    return top_saved_tensors_hooks(False) is not None


def saved_tensor_hooks_are_set() -> bool:
    """The same, also inside ``without_saved_tensor_hooks``."""
    return top_saved_tensors_hooks(True) is not None


def backwards_are_watched() -> bool:
    """Whether more hangs on a backward than its gradients: what is saved for it, or each of its steps, is looked at."""
    return saved_tensor_hooks_are_set() or torch.is_anomaly_enabled()
