"""``torch.nn.Module``: parameters, buffers, submodules, and calls without running hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as module_registry

from compile_core.capture.base import CaptureState, Value
from compile_core.capture.constants import is_none
from compile_core.capture.containers import SequenceValue, SliceValue
from compile_core.capture.mappings import DictValue
from compile_core.capture.objects import InstanceValue, find_class_entry
from compile_core.ir.sources import AttributeSource, ItemSource, ModuleEntrySource, Source

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOK_TABLES = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")

GLOBAL_HOOK_TABLES: tuple[dict[Any, Any], ...] = tuple(
    getattr(module_registry, name)
    for name in (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    )
)


class ModuleValue(InstanceValue):
    """An existing module."""

    def __init__(self, cls: type, real: Any, source: Source | None) -> None:
        super().__init__(cls, real, source)
        # Tensors that stand in for entries of its tables while ``functional_call`` runs.
        self.replaced: dict[str, Value] = {}

    def describe(self) -> str:
        return f"the module {self.source or self.cls.__name__}"

    def truth(self, state: CaptureState) -> bool:
        if (
            find_class_entry(state, self.cls, "__len__")[0] is None
            and find_class_entry(state, self.cls, "__bool__")[0] is None
        ):
            return True
        return super().truth(state)

    def hash_key(self, state: CaptureState) -> Any:
        return self.real

    def own_attribute(self, state: CaptureState, name: str) -> Value | None:
        if (self.changes or self.replaced) and name in (*_TABLES, "__dict__"):
            raise state.unsupported("module-tables", f"reading {name} of a module after a store to it")
        return super().own_attribute(state, name)

    def missing_attribute(self, state: CaptureState, name: str) -> Value:
        owner, _ = find_class_entry(state, self.cls, "__getattr__")
        if owner is not torch.nn.Module:
            return super().missing_attribute(state, name)
        found = self.table_entry(state, name)
        if found is not None:
            return found
        self.guard_absent(state, name)
        if self.source is not None:
            for table in _TABLES:
                state.guards.absent(ItemSource(AttributeSource(self.source, "__dict__"), table), name)
        raise state.raise_exception(AttributeError, f"{self.cls.__name__!r} object has no attribute {name!r}")

    def table_entry(self, state: CaptureState, name: str) -> Value | None:
        """A parameter, buffer or submodule; None where there is none of this name."""
        if name in self.replaced:
            return self.replaced[name]
        for table in _TABLES:
            entries = self.real.__dict__[table]
            known = state.known.get(id(entries))
            if known is not None and id(known[1]) in state.effects.containers:
                raise state.unsupported(
                    "module-tables", f"reading {name!r} of a module after a store to {table}"
                )
            if name in entries and name not in self.changes:
                source = None if self.source is None else ModuleEntrySource(self.source, table, name)
                return state.wrap(entries[name], source)
        return None

    def set_attribute(self, state: CaptureState, name: str, value: Value) -> None:
        owner, _ = find_class_entry(state, self.cls, "__setattr__")
        if owner is not torch.nn.Module:
            raise state.unsupported("setattr", f"{self.cls.__qualname__} defines __setattr__")
        own = self.real.__dict__
        is_special = issubclass(value.python_type(), (torch.nn.Parameter, torch.nn.Module))
        if (
            is_special
            or name in own["_parameters"]
            or name in own["_modules"]
            or name in (*_TABLES, *_HOOK_TABLES)
        ):
            raise state.unsupported("module-store", f"a store of {value.describe()} to {name!r} of a module")
        if name in own["_buffers"]:
            if not issubclass(value.python_type(), (torch.Tensor, type(None))):
                raise state.unsupported(
                    "module-store", f"a store of {value.describe()} to the buffer {name!r}"
                )
            self.change(state, name, value)
            return
        self.store(state, name, value)

    def get_item(self, state: CaptureState, key: Value) -> Value:
        if isinstance(key, SliceValue) and _slices_are_new_modules(self.cls):
            return ModuleSlice(state, self, key)
        return super().get_item(state, key)

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.cls.__call__ is not torch.nn.Module.__call__:
            return super().call(state, args, kwargs)
        if isinstance(self.real, torch.jit.ScriptModule):
            raise state.unsupported("script-module", f"{self.describe()} is a TorchScript module")
        if not self._has_forward_hooks():
            check_no_hooks(state, self)
            return self.get_attribute(state, "forward").call(state, args, kwargs)
        return self._call_with_hooks(state, args, kwargs)

    def _has_forward_hooks(self) -> bool:
        own = self.real.__dict__
        return bool(own["_forward_hooks"] or own["_forward_pre_hooks"])

    def _call_with_hooks(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Pre-hooks, forward, hooks, in the order of ``nn.Module._call_impl``."""
        own = self.real.__dict__
        special = (
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
            "_forward_pre_hooks_with_kwargs",
        )
        backward = own["_backward_hooks"] or own["_backward_pre_hooks"]
        if backward or any(GLOBAL_HOOK_TABLES) or any(own[table] for table in special):
            raise state.unsupported(
                "module-hooks",
                f"{self.describe()} has backward hooks, or hooks that take keywords or run always",
                "remove the hooks, or call what they do in forward",
            )
        if self.source is not None:
            tables = AttributeSource(self.source, "__dict__")
            for table in (*special, "_backward_hooks", "_backward_pre_hooks"):
                state.guards.length(ItemSource(tables, table), 0)
        for hook in self._hooks(state, "_forward_pre_hooks"):
            changed = hook.call(state, [self, SequenceValue(list(args), tuple)], {})
            if not is_none(changed):
                is_tuple = isinstance(changed, SequenceValue) and issubclass(changed.cls, tuple)
                args = state.items_of(changed) if is_tuple else [changed]
        result = self.get_attribute(state, "forward").call(state, args, kwargs)
        for hook in self._hooks(state, "_forward_hooks"):
            changed = hook.call(state, [self, SequenceValue(list(args), tuple), result], {})
            if not is_none(changed):
                result = changed
        return result

    def _hooks(self, state: CaptureState, table: str) -> list[Value]:
        hooks = self.own_attribute(state, table)
        assert isinstance(hooks, DictValue)
        hooks.guard_keys(state)
        return [hooks.get(state, key) for key in list(hooks.entries)]


class ModuleSlice(ModuleValue):
    """``layers[a:b]``: a new ``ModuleList`` or ``Sequential`` of some of the children."""

    def __init__(self, state: CaptureState, parent: ModuleValue, key: SliceValue) -> None:
        modules = parent.own_attribute(state, "_modules")
        assert isinstance(modules, DictValue)
        modules.guard_keys(state)
        for name in modules.entries:
            parent.table_entry(
                state, name
            )  # known from here on, so that the slice's children are the parent's
        super().__init__(parent.cls, parent.real[key.as_constant()], None)
        self.parent = parent
        self.key = key


def _slices_are_new_modules(cls: type) -> bool:
    """Whether a module's slices are made as torch makes them, by code that nobody replaced."""
    return any(
        issubclass(cls, torch_class)
        and all(getattr(cls, name) is getattr(torch_class, name) for name in ("__getitem__", "__init__"))
        for torch_class in (torch.nn.ModuleList, torch.nn.Sequential)
    )


def check_no_hooks(state: CaptureState, module: ModuleValue) -> None:
    """A module call is its forward only while no hook is registered; guard that."""
    own = module.real.__dict__
    if any(own[table] for table in _HOOK_TABLES) or any(GLOBAL_HOOK_TABLES):
        raise state.unsupported(
            "module-hooks",
            f"{module.describe()} has hooks",
            "remove the hooks, or call what they do in forward",
        )
    if module.source is not None:
        owner = AttributeSource(module.source, "__dict__")
        state.guards.all_false(owner, _HOOK_TABLES, f"{module.source} has no hooks")
