"""What holds for a thread or the process while operators run: gradients, autocast, modes."""

from __future__ import annotations

from torch.autograd import forward_ad

from gradsplit.compile_core.torch_facts.private_parts import private

set_grad_enabled = private("torch._C:_set_grad_enabled", "turning gradients on and off in compiled code")
set_default_dtype = private("torch._C:_set_default_dtype", "torch.set_default_dtype in compiled code")
is_any_autocast_enabled = private("torch._C:_is_any_autocast_enabled", "a guard: autocast")
deterministic_algorithms = private("torch._C:_get_deterministic_algorithms", "a guard: determinism")
deterministic_only_warns = private("torch._C:_get_deterministic_algorithms_warn_only", "a guard: determinism")
is_tracing = private("torch._C:_is_tracing", "a guard: torch.jit.trace")
get_tracing_state = private("torch._C:_get_tracing_state", "a guard: torch.jit.trace")
number_of_function_modes = private("torch._C:_len_torch_function_stack", "a guard: __torch_function__ modes")
number_of_dispatch_modes = private("torch._C:_len_torch_dispatch_stack", "a guard: __torch_dispatch__ modes")
function_mode_at = private("torch._C:_get_function_stack_at", "a guard: the default device")
push_function_mode = private(
    "torch._C:_push_on_torch_function_stack", "torch.device as a context in programs"
)
pop_function_mode = private("torch._C:_pop_torch_function_stack", "torch.device as a context in programs")
DeviceContext = private("torch.utils._device:DeviceContext", "a guard: the default device")
device_constructors = private(
    "torch.utils._device:_device_constructors", "which functions a default device concerns"
)
DisableTorchFunction = private("torch._C:DisableTorchFunction", "computing constants apart from all modes")
disable_current_modes = private(
    "torch.utils._python_dispatch:_disable_current_modes", "computing constants apart from all modes"
)
privateuse1_backend_name = private("torch._C:_get_privateuse1_backend_name", "the names of devices")
fp32_precision_getter = private(
    "torch._C:_get_fp32_precision_getter", "a guard: precision of products", "since torch 2.9", instead=False
)
fp32_precision_setter = private(
    "torch._C:_set_fp32_precision_setter", "a guard: precision of products", "since torch 2.9", instead=False
)

_AUTOCAST = "autocast inside of compiled code"
enter_autocast = private("torch.amp.autocast_mode:_enter_autocast", _AUTOCAST)
exit_autocast = private("torch.amp.autocast_mode:_exit_autocast", _AUTOCAST)
_INFERENCE = "torch.inference_mode inside of compiled code"
enter_inference_mode = private("torch.autograd.grad_mode:_enter_inference_mode", _INFERENCE)
exit_inference_mode = private("torch.autograd.grad_mode:_exit_inference_mode", _INFERENCE)
InferenceModeGuard = private("torch._C:_InferenceMode", _INFERENCE)
pop_mode_temporarily = private(
    "torch.overrides:_pop_mode_temporarily", "asking apart from the default device what a function returns"
)
CachingDispatchMode = private(
    "torch.utils.checkpoint:_CachingTorchDispatchMode", "selective checkpoints in programs"
)


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way."""
    return forward_ad._current_level >= 0


profiler_is_on = private(
    "torch.autograd:_profiler_enabled", "runs that are recorded are profiled", "they are not", lambda: True
)
