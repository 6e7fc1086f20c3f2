"""``torch.nn.Module``: parameters, buffers, submodules, calls and hooks."""

from __future__ import annotations

from typing import Any

import torch

from gradsplit.compile_core.capture.object_model.class_entries import find_class_entry
from gradsplit.compile_core.capture.object_model.objects import InstanceValue
from gradsplit.compile_core.capture.values.base import CaptureState, LazyValue, SymbolicRaise, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue
from gradsplit.compile_core.capture.values.mappings import DictValue
from gradsplit.compile_core.ir.sources import ItemSource, ModuleEntrySource, Source, path_words
from gradsplit.compile_core.torch_facts.modules import GLOBAL_HOOK_TABLES, GLOBAL_HOOKS, call_with_hooks

# Why a graph ends where a module is called that has a compiled form of its own.
COMPILED_APART = "compiled-apart"

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOK_TABLES = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")

_GLOBAL_TABLES_OF_FORWARD = (
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
)


class ModuleValue(InstanceValue):
    """A module: one that exists, or one that was made in the frame, whose ``real`` is None.

    What is registered lies in three tables. Of an existing module the tables are read entry by entry, without a value
    of their own, until the program itself looks at them or changes them.
    """

    def __init__(self, cls: type, real: Any, source: Source | None) -> None:
        super().__init__(cls, real, source)
        self._tables: dict[str, DictValue] = {}
        # Tensors that stand in for entries of its tables while ``functional_call`` runs.
        self.replaced: dict[str, Value] = {}

    def describe(self) -> str:
        return f"the module {self.source or self.cls.__name__}"

    def own_attribute(self, state: CaptureState, name: str) -> Value | None:
        if self.replaced and name in (*_TABLES, "__dict__"):
            raise state.unsupported("module-tables", f"reading {name} of a module in functional_call")
        if name in _TABLES and name not in self.changes and self.source is not None:
            return self._table(state, name)
        return super().own_attribute(state, name)

    def _table(self, state: CaptureState, name: str) -> Value | None:
        """A table of an existing module as a dictionary."""
        place = self.dict_source()
        real = self.real_dict().get(name)
        if name in self._tables or place is None or self.source is None or real is None:
            return self._tables.get(name)
        source = ItemSource(place, name)
        state.guards.type_is(source, type(real))
        entries: dict[Any, tuple[Value, Any]] = {
            key: (ConstantValue(key), LazyValue(item, ModuleEntrySource(self.source, name, key)))
            for key, item in real.items()
        }
        made = self._tables[name] = DictValue(entries, type(real), source)
        state.known[id(real)] = (real, made)
        return made

    def missing_attribute(self, state: CaptureState, name: str) -> Value:
        owner, _ = find_class_entry(state, self.cls, "__getattr__")
        if owner is not torch.nn.Module:
            return super().missing_attribute(state, name)
        return self.registered_attribute(state, name)

    def registered_attribute(self, state: CaptureState, name: str) -> Value:
        """What ``torch.nn.Module.__getattr__`` finds: a parameter, buffer or submodule."""
        found = self.table_entry(state, name)
        if found is None:
            raise state.no_attribute(self.cls, name)
        return found

    def table_entry(self, state: CaptureState, name: str) -> Value | None:
        """A parameter, buffer or submodule; None where there is none of this name."""
        if name in self.replaced:
            return self.replaced[name]
        unread = [table for table in _TABLES if table not in self._tables and table not in self.changes]
        for table in _TABLES:
            if table in unread:
                entries = self.real_dict().get(table, {})
                if name in entries:
                    source = None if self.source is None else ModuleEntrySource(self.source, table, name)
                    return state.wrap(entries[name], source)
                continue
            known = self.changes.get(table) or self._tables.get(table)
            found = known.find(state, ConstantValue(name)) if isinstance(known, DictValue) else None
            if found is not None:
                return found
        place = self.dict_source()
        if place is not None:
            for table in unread:
                state.guards.absent(ItemSource(place, table), name)
        return None

    def call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.real is not None and state.is_compiled_apart(self.real):
            raise state.unsupported(
                COMPILED_APART,
                f"{self.describe()}, a {self.cls.__name__}, is compiled by itself, into graphs of its own",
            )
        if self.source is None:
            return self._call(state, args, kwargs)
        state.modules.append(".".join(path_words(self.source)))
        try:
            return self._call(state, args, kwargs)
        finally:
            state.modules.pop()

    def _call(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.cls.__call__ is not torch.nn.Module.__call__:
            return super().call(state, args, kwargs)
        if isinstance(self.real, torch.jit.ScriptModule):
            raise state.unsupported("script-module", f"{self.describe()} is a TorchScript module")
        if self.cls._call_impl is not call_with_hooks:
            return self.get_attribute(state, "_call_impl").call(state, args, kwargs)
        if not self.has_hooks(state):
            return self.get_attribute(state, "forward").call(state, args, kwargs)
        return self._call_with_hooks(state, args, kwargs)

    def has_hooks(self, state: CaptureState) -> bool:
        """Whether a call is more than its forward; that it is not is guarded."""
        if any(GLOBAL_HOOK_TABLES):
            return True
        if self.real is None:
            tables = [self.own_attribute(state, table) for table in _HOOK_TABLES]
            return any(table is not None and table.truth(state) for table in tables)
        if any(self.real_dict().get(table) for table in _HOOK_TABLES):
            return True
        place = self.dict_source()
        if place is not None:
            state.guards.all_false(place, _HOOK_TABLES, f"{self.source} has no hooks")
        return False

    def _call_with_hooks(self, state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """``torch.nn.Module._call_impl``, which runs the hooks; they are guarded as all that it reads."""
        for table in ("_backward_hooks", "_backward_pre_hooks"):
            hooks = self.own_attribute(state, table)
            if GLOBAL_HOOKS[f"_global{table}"] or (hooks is not None and hooks.truth(state)):
                raise state.unsupported(
                    "module-hooks", f"{self.describe()} has backward hooks", "use hooks of tensors instead"
                )
        for name in _GLOBAL_TABLES_OF_FORWARD:
            table = GLOBAL_HOOKS[name]
            state.wrap(table, state.reference_source(name, table))
        run = state.wrap(call_with_hooks, None)
        try:
            return run.call(state, [self, *args], kwargs)
        except SymbolicRaise:
            always = self.own_attribute(state, "_forward_hooks_always_called")
            if GLOBAL_HOOKS["_global_forward_hooks_always_called"] or (always and always.truth(state)):
                raise state.unsupported(
                    "module-hooks", f"{self.describe()} raises and has hooks that run all the same"
                ) from None
            raise
