"""Torch's native module and its bindings: which functions are operators, and where its library lies."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from gradsplit.compile_core.torch_facts.private_parts import PROGRAMS_RUN_PLAIN, private

_FUNCTIONS = "which functions of torch are native operators"

VARIABLE_FUNCTIONS = private("torch._C:_VariableFunctions", _FUNCTIONS)
NATIVE_NN = private("torch._C:_nn", _FUNCTIONS)
NATIVE_SCOPES = (
    VARIABLE_FUNCTIONS,
    NATIVE_NN,
    *(
        private(f"torch._C:{name}", _FUNCTIONS, PROGRAMS_RUN_PLAIN, SimpleNamespace())
        for name in ("_linalg", "_fft", "_special")
    ),
)
torch_native = private("torch._C", "names of functions in exported graphs")
LIBRARY_FILE: str = private(
    "torch._C:__file__",
    "calls of torch's kernels from compiled code",
    "the path of the package",
    torch.__file__,
)
disable_torch_compile = private(
    "torch._compile:_disable_dynamo",
    "capturing torch's optimizers, which torch marks with it",
    "their steps run as plain Python",
    lambda function=None, recursive=True: function,
)
group_by_device_and_dtype = private(
    "torch._C:_group_tensors_by_device_and_dtype", "capturing torch's foreach optimizers"
)
log_api_usage_once = private("torch._C:_log_api_usage_once", "capturing modules that are made in a program")
is_scripting = private("torch._jit_internal:is_scripting", "programs that ask whether they are scripted")
_NO_NUMPY = SimpleNamespace(
    ndarray=type("ndarray", (), {}), linalg=SimpleNamespace(), fft=SimpleNamespace(), random=SimpleNamespace()
)
numpy_of_torch = private(
    "torch._numpy", "NumPy in compiled code", "functions that call NumPy are not captured in full", _NO_NUMPY
)
broadcast_and_flatten = private(
    "torch.utils._pytree:_broadcast_to_and_flatten", "torch.vmap with nested in_dims", PROGRAMS_RUN_PLAIN
)
