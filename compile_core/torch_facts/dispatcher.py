"""Torch's dispatcher: keys, which kernels there are, and how operators behave on fake tensors."""

from __future__ import annotations

from gradsplit.compile_core.torch_facts.private_parts import private

has_kernel_for_key = private(
    "torch._C:_dispatch_has_kernel_for_dispatch_key", "which operators are made of others"
)
dispatch_keys = private("torch._C:_dispatch_keys", "a guard: a tensor's dispatch keys")
ForceDispatchKeyGuard = private("torch._C:_ForceDispatchKeyGuard", "tracing with the caller's dispatch keys")
included_keys = private("torch._C:_dispatch_tls_local_include_set", "tracing with the caller's dispatch keys")
excluded_keys = private("torch._C:_dispatch_tls_local_exclude_set", "tracing with the caller's dispatch keys")
enable_python_dispatcher = private("torch._dispatch.python:enable_python_dispatcher", "shapes of results")
suggest_memory_format = private("torch._prims_common:suggest_memory_format", "strides of results")
is_alias_of = private("torch._C:_is_alias_of", "whether two tensors share memory")
