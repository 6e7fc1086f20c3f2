"""The public functions: ``compile`` and what goes with it."""

from __future__ import annotations

import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND, GraphBackend, RegionBackend
from gradsplit.compile_core.capture.directives import compiled_by_torch, leave_alone
from gradsplit.compile_core.capture.numpy_arrays.numpy_wrapper import form_of_torchs_wrapper
from gradsplit.compile_core.compiled_calls.capture_findings import CallSettings
from gradsplit.compile_core.compiled_calls.compiled_code import ProgramsByCode
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule, wrap_module
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.interface.module_compilers import (
    ClaimedModules,
    CompileRequest,
    claim,
    compile_claimed,
    compile_for_callers,
)
from gradsplit.compile_core.interface.supported_here import say_once, why_nothing_is_compiled
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.many_sizes.region_around_data import is_mostly_of_data
from gradsplit.compile_core.observe.compile_profiler import CompileProfiler
from gradsplit.compile_core.observe.observer import Observer
from gradsplit.compile_core.options import compilation_is_off
from gradsplit.compile_core.pipeline import compile_graph

logger = logging.getLogger(__name__)


@leave_alone
def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] | None = DEFAULT_BACKEND,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
) -> Any:
    """Compiles a function or module at its first call; the arguments are those of ``torch.compile``.

    Args:
        model: a function, method or ``torch.nn.Module``; left out, ``compile`` is a decorator. Of a class, the method
            that calls of its instances run is compiled.
        fullgraph: raise ``Unsupported`` where the whole call is not one graph, instead of running that part in Python.
            A ``DistributedDataParallel`` module that it calls is one graph of its own.
        dynamic: ``None``: sizes are static at first; one that differs at a later call becomes symbolic there, and one
            entry serves all its values from then on. ``True``: all sizes and integers among the arguments are symbolic
            from the first call on, as far as the program allows. ``False``: other sizes compile another entry.
        backend: a name of ``list_backends()``, or a callable of ``(torch.fx.GraphModule, example_inputs)``;
            ``None`` is the default.
        mode: a name of ``list_mode_options()``; a backend of the user's gets it as a keyword argument, if it is given
            and is not "default".
        options: settings by name, see ``list_options()``; a backend of the user's gets them likewise, and "inductor"
            those of TorchInductor's own.
        name: taken as by torch; messages have the function's own.
        recompile_limit: the option ``cache_size_limit`` by torch's name.
        disable: return ``model`` as it is; so does a process with ``GRADSPLIT_DISABLE=1`` or
            ``TORCH_COMPILE_DISABLE=1``. Under ``torch.compiler.set_stance("force_eager")`` calls run as plain Python.

    Returns:
        For a function, a function that equals it. For a module, a module with the same parameters, attributes and
        state_dict. A ``DistributedDataParallel`` module reduces its gradients inside the compiled backward.

    Raises:
        TypeError: ``model`` is not callable, or an argument has the wrong type.
        ValueError: unknown backend, mode or option; the message says what is allowed.
        RuntimeError: a mode and options at once.
    """
    request = CompileRequest.of(fullgraph, dynamic, backend, mode, options, recompile_limit)
    if model is None:
        return lambda decorated: _compile_callable(decorated, request, disable)
    return _compile_callable(model, request, disable)


def _compile_callable(model: Any, request: CompileRequest, disable: bool) -> Any:
    if isinstance(model, (staticmethod, classmethod)):
        return type(model)(_compile_callable(model.__func__, request, disable))
    if not callable(model):
        raise TypeError(f"compile takes a function or a torch.nn.Module, not {type(model).__name__}")
    if disable or compilation_is_off():
        return model
    if isinstance(model, type):
        return _compile_calls_of_instances(model, request)
    if isinstance(model, CompiledModule):
        model = model._orig_mod
    attribute = compiled_by_torch(model)
    if attribute is not None:
        model = getattr(model, attribute)
    model = form_of_torchs_wrapper(model) or model
    if isinstance(model, torch.jit.ScriptModule):
        if request.fullgraph:
            raise Unsupported("script-module", "TorchScript has compiled the module already")
        logger.warning("a TorchScript module is compiled already, and runs as it is")
        return model
    claimed = claim(model) if isinstance(model, torch.nn.Module) else None
    reason = why_nothing_is_compiled()
    if reason is not None and request.fullgraph:
        raise Unsupported("missing-part-of-torch", reason)
    say_once(reason)
    if reason is not None:
        return model
    if not isinstance(model, torch.nn.Module):
        return _compile_plain(model, request)
    run = _compile_plain(model, request) if claimed is None else compile_claimed(model, request)
    return wrap_module(model, run)


def _compile_calls_of_instances(cls: type, request: CompileRequest) -> type:
    """The class itself, with a compiled method: the one that calls of its instances run."""
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    method = inspect.getattr_static(cls, name, None)
    if not isinstance(method, (types.FunctionType, CompiledFunction)):
        raise TypeError(f"calls of {cls.__qualname__} cannot be compiled: it has no method {name}")
    setattr(cls, name, _compile_plain(method, request))
    return cls


def _compile_plain(model: Callable[..., Any], request: CompileRequest) -> CompiledFunction:
    programs = _programs_of(request)
    return CompiledFunction(model, programs.settings.compile_graph, programs=programs)


# What was compiled for requests that are in use. Equal requests share it.
_programs: list[tuple[CompileRequest, weakref.ref[ProgramsByCode]]] = []


def _programs_of(request: CompileRequest) -> ProgramsByCode:
    """What was compiled for equal requests; a CUDA graph belongs to the memory of who calls it, and is not shared."""
    if request.options.cuda_graphs:
        return _new_programs(request)
    _programs[:] = [(other, programs) for other, programs in _programs if programs() is not None]
    for other, programs in _programs:
        found = programs() if other == request else None
        if found is not None:
            return found
    made = _new_programs(request)
    _programs.append((request, weakref.ref(made)))
    return made


def _new_programs(request: CompileRequest) -> ProgramsByCode:
    backend, cache_limit = request.backend, request.options.cache_size_limit
    generates_kernels = isinstance(backend, RegionBackend) and not backend.takes_open_sizes

    def compile_captured(captured: CapturedGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        may_end = captured.end_at_data is not None and not request.fullgraph
        if may_end and generates_kernels and is_mostly_of_data(captured.module):
            raise Unsupported("sizes-of-data", "most of the graph has sizes that depend on data")
        failures = request.failures_of(captured, inputs)
        with failures.compiling():
            compiled = compile_for_callers(captured, inputs, request) or compile_graph(
                captured, inputs, backend=backend, options=request.options
            )
        return failures.watched(compiled)

    # A backend that is an observer, too, observes what leads to the graphs that it compiles.
    observer = (
        backend.compile
        if isinstance(backend, GraphBackend) and isinstance(backend.compile, Observer)
        else None
    )
    if isinstance(observer, CompileProfiler) and cache_limit is None:
        cache_limit = observer.cache_limit
    return ProgramsByCode(
        CallSettings(
            compile_captured,
            request.fullgraph,
            request.dynamic,
            cache_limit,
            observer,
            ClaimedModules(request),
            # A CUDA graph has its sizes for good.
            DataEnds(changes_last=False, unasked=False, at_backwards=True)
            if request.options.cuda_graphs
            else backend.new_data_ends(),
        ),
        kept=not request.options.cuda_graphs,
    )
