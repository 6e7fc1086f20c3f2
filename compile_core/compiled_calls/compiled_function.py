"""Stage 0: a callable that looks up its guard table, and has captured and compiled what the table lacks."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.capture import SizeHistory
from gradsplit.compile_core.capture.directives import leave_alone
from gradsplit.compile_core.compiled_calls.bound_calls import dispatch_function, plain_function
from gradsplit.compile_core.compiled_calls.call_targets import (
    NO_OWNER,
    CalledCode,
    CalledForward,
    Compiled,
    ModulesApart,
    Target,
    find_target,
    original_of,
    shown_name,
)
from gradsplit.compile_core.compiled_calls.capture_findings import CallSettings, CompileGraph
from gradsplit.compile_core.compiled_calls.compiled_code import CompiledCode, ProgramsByCode, forget_all
from gradsplit.compile_core.compiled_calls.entry_table import Entry, EntryTable
from gradsplit.compile_core.compiled_calls.hooked_modules import has_hooks
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.observe.observer import Observer
from gradsplit.compile_core.torch_facts.apart_from_torch_compile import apart_from_torch_compile
from gradsplit.compile_core.torch_facts.torchs_stance import stance


@dataclass
class _Form:
    """What calls of one target run: a table of the function's own over what was compiled of the target's code."""

    target: Target
    called: CalledCode
    code: CompiledCode
    table: EntryTable
    dispatch: Callable[..., Any]
    history: SizeHistory | None


# How many targets of one module are remembered, whose forward a program replaces and puts back.
_MOST_FORMS = 8


class CompiledFunction(Compiled):
    """A function, method or module whose calls run compiled graphs.

    Args:
        fn: a Python function, a bound method, an ``nn.Module`` (its call is compiled), or an object whose class defines
            ``__call__`` in Python.
        compile_graph: given a captured graph and its real inputs, returns what is called as ``compiled(*tensors)`` and
            returns the flat tuple of the graph's outputs.
        fullgraph: raise Unsupported, with the user's line, where other graphs than of ``modules_apart`` are needed.
        dynamic: None makes the sizes symbolic that differ between calls, True all of them at once, False none.
        cache_limit: how many different captures a code object may have before calls run as plain Python; None is
            ``config.cache_size_limit`` at the time.
        observer: is called at captures and misses, also at those of continuations and callees.
        modules_apart: modules among what it calls that have a compiled form of their own, and no part in its graphs.
        data_ends: where numbers and sizes that depend on data end graphs; by default they do unless somebody asked.
        programs: what was compiled under these very settings already, shared with other functions.

    Attributes:
        original: ``fn``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        compile_graph: CompileGraph,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        cache_limit: int | None = None,
        observer: Observer | None = None,
        modules_apart: ModulesApart | None = None,
        data_ends: DataEnds | None = None,
        programs: ProgramsByCode | None = None,
    ) -> None:
        fn = original_of(fn)
        self.original = fn
        apart = modules_apart or ModulesApart()
        settings = CallSettings(compile_graph, fullgraph, dynamic, cache_limit, observer, apart, data_ends)
        self._programs = programs or ProgramsByCode(settings)
        self._called_forward = CalledForward(fn) if isinstance(fn, torch.nn.Module) else None
        self._forms: list[_Form] = []
        self._take(find_target(fn))
        _living[next(_numbers)] = self

    def _take(self, target: Target) -> None:
        """Calls run this target from now on."""
        for form in self._forms:
            if form.target.function is target.function and not form.called.has_changed():
                self._use(form)
                return
        code = self._programs.of(target, shown_name(target))
        table = EntryTable()
        call_plain = plain_function(target, self.original)

        def miss(arguments: tuple[Any, ...]) -> Any:
            return code.call_missed(arguments, call_plain, table, form.history)

        dispatch = dispatch_function(target, table, miss)
        form = _Form(target, CalledCode(target.function), code, table, dispatch, self._new_history(target))
        self._forms = [form, *self._forms[: _MOST_FORMS - 1]]
        self._use(form)
        functools.update_wrapper(self, target.function)

    def _new_history(self, target: Target) -> SizeHistory | None:
        """Sizes that differ between objects of one class need not differ between the calls of one of them."""
        return None if target.owner is NO_OWNER else SizeHistory(self._programs.settings.dynamic)

    def _use(self, form: _Form) -> None:
        self._form = form
        self._called_code = form.called
        self._dispatch: Any = form.dispatch
        self._owner = form.target.owner
        self._is_module_call = form.target.is_module_call

    @apart_from_torch_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if stance() == "force_eager":
            return self.original(*args, **kwargs)
        if self._called_forward is not None and self._called_forward.has_changed():
            self._take(find_target(self.original))
        elif self._called_code.has_changed():
            self._take(self._form.target)
        if self._is_module_call and self._owner is not NO_OWNER and has_hooks(self._owner):
            forward = self._form.target.function.__code__
            return self._form.code.hooked_calls(forward)(self._owner, *args, **kwargs)
        return self._dispatch(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Compiled functions are descriptors as functions are, so that methods can be compiled in a class body."""
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> CompiledFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """A function is its own copy; of a bound method or an object, the compiled form of its copy is made."""
        copied = copy.deepcopy(self.original, memo)
        if copied is self.original:
            return self
        return CompiledFunction(copied, self._programs.settings.compile_graph, programs=self._programs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by name where its module has it under its name, else as what it was made from: kernels do not
        travel."""
        function = self._form.target.function
        found: Any = sys.modules.get(function.__module__)
        for name in function.__qualname__.split("."):
            found = getattr(found, name, None)
        return function.__qualname__ if found is self else (original_of, (self.original,))

    def reset(self) -> None:
        """Forget every capture, of the code that it shares with others too."""
        for form in self._forms:
            form.table.clear()
            form.code.reset()
            form.history = self._new_history(form.target)

    @property
    def frame_code(self) -> types.CodeType:
        return self._dispatch.__code__

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The guard table, most recently used first."""
        return self._form.table.entries

    @property
    def continuations(self) -> tuple[CompiledCode, ...]:
        """The resume functions after the graph breaks of its code."""
        return self._form.code.continuations

    @property
    def callees(self) -> tuple[CompiledCode, ...]:
        """The code that is called at the graph breaks of its code."""
        return self._form.code.callees

    @property
    def break_reasons(self) -> list[Unsupported]:
        """Why captures of its code ended early, in the order in which it was found."""
        return self._form.code.break_reasons


# Every compiled function that is in use, by its age.
_living: weakref.WeakValueDictionary[int, CompiledFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def living_functions() -> list[CompiledFunction]:
    """All compiled functions, oldest first."""
    return [function for _, function in sorted(_living.items())]


@leave_alone
def reset() -> None:
    """Forget everything that was compiled: the next call of every compiled function captures anew."""
    for function in living_functions():
        function.reset()
    forget_all()
