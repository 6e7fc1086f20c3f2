"""The plug-in point for data parallelism: who compiles a module of a type that this package does not know, and graphs
that such a module may call.

``compile`` must know what to do with a ``DistributedDataParallel`` without this package importing the one that does it.
A plug-in is a ``ModuleCompiler``: that of ``gradsplit.distributed``, and those that other installed packages declare
under the entry-point group ``gradsplit.planners``.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

import torch

from gradsplit.compile_core.backends.registry import (
    DEFAULT_BACKEND,
    Backend,
    GraphBackend,
    RegionBackend,
    resolve_backend,
)
from gradsplit.compile_core.compiled_calls.call_targets import ModulesApart
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.compiled_calls.entry_table import RunGraph
from gradsplit.compile_core.compiled_calls.kept_random_state import kept_random_state
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.minimizer.write_failures import GraphFailures
from gradsplit.compile_core.options import (
    CompileOptions,
    ReproRequest,
    parse_options,
    refuse_both,
    requested_repro,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of one ``compile`` call, checked, and what is to become of graphs that fail."""

    backend: Backend
    options: CompileOptions
    fullgraph: bool
    dynamic: bool | None = None
    repro: ReproRequest | None = field(default_factory=requested_repro)

    def failures_of(self, captured: CapturedGraph, inputs: Sequence[Any]) -> GraphFailures:
        """What writes a graph that fails, if it is to be written."""
        return GraphFailures(captured, inputs, self.backend, self.options, self.repro)

    @staticmethod
    def of(
        fullgraph: bool,
        dynamic: bool | None,
        backend: str | Callable[..., Any] | None,
        mode: str | None,
        options: Mapping[str, Any] | None,
        recompile_limit: int | None = None,
    ) -> CompileRequest:
        """Checks the arguments; see ``gradsplit.compile``, which says what is raised."""
        if not isinstance(fullgraph, bool):
            raise TypeError(f"fullgraph must be True or False, not {fullgraph!r}")
        if dynamic is not None and not isinstance(dynamic, bool):
            raise TypeError(f"dynamic must be None, True or False, not {dynamic!r}")
        options = _without_guard_filter(options)
        resolved = resolve_backend(DEFAULT_BACKEND if backend is None else backend)
        if isinstance(resolved, GraphBackend) and resolved.takes_options:
            refuse_both(mode, options)
            resolved = resolved.with_options(mode, options)
            mode = options = None
        elif isinstance(resolved, RegionBackend) and isinstance(options, Mapping):
            own = {name: value for name, value in options.items() if resolved.takes(name)}
            if own:
                resolved = resolved.with_options(own)
                options = {name: value for name, value in options.items() if name not in own}
        request = CompileRequest(resolved, parse_options(mode, options), fullgraph, dynamic)
        if recompile_limit is not None:
            limited = parse_options(None, {"cache_size_limit": recompile_limit}).cache_size_limit
            request = replace(request, options=replace(request.options, cache_size_limit=limited))
        ignored = request.options.changed & resolved.ignored_options
        if ignored:
            logger.warning("the backend %r has no use for the options %s", resolved.name, sorted(ignored))
        return request


def _without_guard_filter(options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Torch takes it out of the options before a backend sees them, too."""
    if not isinstance(options, Mapping) or "guard_filter_fn" not in options:
        return options
    if not callable(options["guard_filter_fn"]):
        raise TypeError(f"option 'guard_filter_fn' takes a function, not {options['guard_filter_fn']!r}")
    logger.info("guard_filter_fn is not called: all guards stay")
    return {name: value for name, value in options.items() if name != "guard_filter_fn"} or None


@dataclass(frozen=True)
class ModuleCompiler:
    """A plug-in.

    Attributes:
        module_type: the modules it claims, subclasses included.
        compile: module and request -> what calls of the compiled module run.
        compile_graph: compiles a graph of any function, with the real inputs of its first call, where it matters which
            of the claimed modules is running when the graph is called; else it returns ``None``.
        explain: what ``explain`` is for such a module, compiled or not, if it is something of its own.
    """

    module_type: type[torch.nn.Module]
    compile: Callable[[Any, CompileRequest], Callable[..., Any]]
    compile_graph: Callable[[CapturedGraph, Sequence[Any], CompileRequest], RunGraph | None] = (
        lambda captured, inputs, request: None
    )
    explain: Callable[[Any], Callable[..., Any]] | None = None


def claim(module: torch.nn.Module) -> ModuleCompiler | None:
    """The plug-in for this module, if there is one."""
    for plugin in _plugins():
        if isinstance(module, plugin.module_type):
            return plugin
    return None


def compile_for_callers(
    captured: CapturedGraph, inputs: Sequence[Any], request: CompileRequest
) -> RunGraph | None:
    """What a plug-in makes of a function's graph that a module which it claims may call; ``None`` if none does."""
    found = (plugin.compile_graph(captured, inputs, request) for plugin in _plugins())
    return next((compiled for compiled in found if compiled is not None), None)


class ClaimedModules(ModulesApart):
    """The modules that plug-ins claim, among what a compiled program calls: each such call runs the module's own form.

    Args:
        request: how the program is compiled, and so they are.
    """

    def __init__(self, request: CompileRequest) -> None:
        self._request = request

    def claims(self, module: torch.nn.Module) -> bool:
        return claim(module) is not None

    def form_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """The compiled call of a claimed module; one that is compiled already is its own."""
        if isinstance(module, CompiledModule):
            return module
        for request, call in _record_of(module).calls:
            if request == self._request:
                return call
        return compile_claimed(module, self._request)


def compile_claimed(module: torch.nn.Module, request: CompileRequest) -> Callable[..., Any]:
    """The compiled call of a module that a plug-in claims, made anew; compiled programs use it from now on."""
    plugin = claim(module)
    assert plugin is not None
    call = plugin.compile(module, request)
    remember_call(module, request, call)
    return call


def remember_call(module: torch.nn.Module, request: CompileRequest, call: Callable[..., Any]) -> None:
    """Compiled programs that were compiled so use this compiled call of a claimed module from now on."""
    record = _record_of(module)
    record.calls = [(other, made) for other, made in record.calls if other != request]
    record.calls.append((request, call))


def forms_of(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """The compiled calls that a claimed module has, oldest first."""
    return tuple(call for _, call in _record_of(module).calls)


class _Record:
    """The compiled calls of one module. They lie among its attributes, so that they live as long as it does."""

    def __init__(self, owner: torch.nn.Module) -> None:
        self.owner = owner
        self.calls: list[tuple[CompileRequest, Callable[..., Any]]] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies and pickles of the module have none."""
        return type(None), ()


def _record_of(module: torch.nn.Module) -> _Record:
    found = module.__dict__.get(_RECORD)
    if found is None or found.owner is not module:  # a shallow copy has the attributes of its original
        found = module.__dict__[_RECORD] = _Record(module)
    return found


_RECORD = "_gradsplit_compiled_calls"


@functools.cache
def _plugins() -> tuple[ModuleCompiler, ...]:
    with kept_random_state():  # some packages draw one when they are imported
        # Imported by its name, since this package imports nothing of that one.
        ddp = importlib.import_module("gradsplit.distributed.compile_core_plugin").PLUGIN
        return (ddp, *(point.load() for point in entry_points(group="gradsplit.planners")))
