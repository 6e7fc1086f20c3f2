"""How a module is called: its hooks, and those of all modules."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.torch_facts.private_parts import private

call_with_hooks = private("torch.nn.modules.module:Module._call_impl", "modules with hooks")
_HOOKS = "hooks of all modules"
_TABLES = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)
_OF_HOOKS = ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs")
# The tables of hooks that all modules have, by name.
GLOBAL_HOOKS: dict[str, dict[Any, Any]] = {
    name: private(f"torch.nn.modules.module:{name}", _HOOKS) for name in (*_TABLES, *_OF_HOOKS)
}
GLOBAL_HOOK_TABLES = tuple(GLOBAL_HOOKS[name] for name in _TABLES)
