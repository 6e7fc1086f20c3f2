"""The backends by name: what turns a captured graph, or a compute region, into something that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

import torch

from gradsplit.compile_core.backends import aot_eager, eager, generated_kernels, inductor
from gradsplit.compile_core.backends.compile_elsewhere import compile_elsewhere
from gradsplit.compile_core.ir.data_reads import DataEnds
from gradsplit.compile_core.options import OPTIONS, unknown_name
from gradsplit.compile_core.runtime.executable import Region

# A user's backend: takes the captured graph and example inputs, returns a callable of the graph's inputs.
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


@dataclass(frozen=True)
class GraphBackend:
    """Takes a whole captured graph, before autograd; gradients are torch's own.

    Attributes:
        takes_options: ``mode`` and ``options`` of a compilation are the backend's own; else they are this compiler's.
        ignored_options: those of this compiler's that mean nothing to it.
        keeps_data: it takes numbers and sizes that depend on data without being asked.
    """

    name: str
    compile: GraphCompiler
    tags: frozenset[str] = frozenset()
    takes_options: bool = True
    ignored_options: frozenset[str] = frozenset()
    keeps_data: bool = False

    def new_data_ends(self) -> DataEnds | None:
        """For what is compiled in one way; None if it ``keeps_data`` only where somebody asked."""
        return DataEnds(changes_last=False) if self.keeps_data else None

    def with_options(self, mode: str | None, options: Mapping[str, Any] | None) -> GraphBackend:
        """The backend that is called with these as keyword arguments, as far as they are given."""
        given = {} if mode in (None, "default") else {"mode": mode}
        given |= {"options": dict(options)} if options else {}
        return replace(self, compile=functools.partial(self.compile, **given)) if given else self


@dataclass(frozen=True)
class RegionBackend:
    """Takes the compute regions of a traced, partitioned and scheduled graph.

    Attributes:
        compile_region: a ``Compute``, ``CompileOptions`` and a ``StageDump`` -> what waits for the rest of the
            compilation, which has started, and returns what runs the region. All regions of a graph are started before
            the first is waited for.
        decompositions: device type and options -> the decompositions that the joint trace applies.
        makes_random_numbers: regions may have the operators of ``ir.counter_random``; else random numbers are torch's.
        aligns_products: matrix products are to be padded (``autograd.rewrites.pad_products``) before it sees them.
        keeps_order: a region's values are made in an order that its graph allows and freed when nothing reads them, so
            that what is computed in chunks is never whole in memory.
        packs_weights: weights that stay the same may be opaque (``ir.packed_weights``).
        takes_open_sizes: regions may have symbolic sizes, and take and return integers beside tensors.
        takes_floats: they may take and return floats, too.
        compile_elsewhere: for a backend that does not take them, what compiles a region for some of its sizes in
            another process; see ``backends.compile_elsewhere``.
        prepare: called with the device type when a graph comes, before its regions are known.
        ignored_options: those that mean nothing to it.
        keeps_data: numbers and sizes that depend on data may be in graphs without being asked.
        takes: whether it has an option of this name, beside this compiler's; ``compile_region`` and ``decompositions``
            are given such options as the keyword argument ``settings``.
    """

    name: str
    compile_region: Callable[..., Callable[[], Region]]
    decompositions: Callable[..., Mapping[Any, Callable[..., Any]]]
    tags: frozenset[str] = frozenset()
    makes_random_numbers: bool = False
    aligns_products: bool = False
    keeps_order: bool = False
    packs_weights: bool = False
    takes_open_sizes: bool = False
    takes_floats: bool = False
    compile_elsewhere: Callable[..., Callable[..., Any] | None] = lambda *region: None
    prepare: Callable[[str], None] = lambda device_type: None
    ignored_options: frozenset[str] = frozenset()
    keeps_data: bool = False
    takes: Callable[[str], bool] = lambda name: False

    def new_data_ends(self) -> DataEnds | None:
        """For what is compiled in one way; what is traced changes its inputs last."""
        return DataEnds(changes_last=True) if self.keeps_data else None

    def with_options(self, own: Mapping[str, Any]) -> RegionBackend:
        """The backend with options of its own."""
        return replace(
            self,
            compile_region=functools.partial(self.compile_region, settings=own),
            decompositions=functools.partial(self.decompositions, settings=own),
        )


Backend = GraphBackend | RegionBackend

DEFAULT_BACKEND = "triton"

_DEBUG = frozenset(["debug"])
# Options about kernels, for those who make none; and those that somebody heeds whatever the backend.
_OF_KERNELS = frozenset(
    ["max_autotune", "epilogue_fusion", "shape_padding", "fallback_random", "chunk_bytes"]
)
_OF_ALL = frozenset(["cache_size_limit"])

_backends: dict[str, Backend] = {
    "eager": GraphBackend(
        "eager",
        eager.compile_graph,
        _DEBUG,
        takes_options=False,
        ignored_options=frozenset(OPTIONS) - _OF_ALL,
        keeps_data=True,
    ),
    "inductor": RegionBackend(
        "inductor",
        inductor.compile_region,
        inductor.decompositions,
        aligns_products=True,
        takes=lambda name: name not in OPTIONS and inductor.has_option(name),
    ),
    # Torch's names: the partition is the same in all, and so is what runs.
    **{
        name: RegionBackend(
            name,
            aot_eager.compile_region,
            decompositions,
            _DEBUG,
            takes_open_sizes=True,
            takes_floats=True,
            ignored_options=_OF_KERNELS,
            keeps_data=True,
        )
        for name, decompositions in (
            ("aot_eager", aot_eager.decompositions),
            ("aot_eager_default_partitioner", aot_eager.decompositions),
            ("aot_eager_decomp_partition", generated_kernels.decompositions),
        )
    },
    "triton": RegionBackend(
        "triton",
        generated_kernels.compile_region,
        generated_kernels.decompositions,
        makes_random_numbers=True,
        aligns_products=True,
        keeps_order=True,
        packs_weights=True,
        keeps_data=True,
        compile_elsewhere=compile_elsewhere,
        prepare=generated_kernels.prepare,
    ),
}


def register_backend(
    compiler_fn: GraphCompiler | None = None, name: str | None = None, tags: Sequence[str] = ()
) -> Any:
    """Makes a graph compiler known by name; usable as a decorator, with or without arguments.

    Args:
        compiler_fn: takes ``(torch.fx.GraphModule, example_inputs)``, returns a callable of the graph's inputs.
        name: the name; the function's own by default.
        tags: words that ``list_backends`` can leave out, such as "debug".

    Raises:
        TypeError: ``compiler_fn`` is not callable.
        ValueError: the name is taken by another compiler.
    """
    if compiler_fn is None:
        return functools.partial(register_backend, name=name, tags=tags)
    if not callable(compiler_fn):
        raise TypeError(f"a backend must be callable, not {type(compiler_fn).__name__}")
    backend = GraphBackend(name or _name_of(compiler_fn), compiler_fn, frozenset(tags))
    known = _backends.get(backend.name, backend)
    if not isinstance(known, GraphBackend) or known.compile is not compiler_fn:
        raise ValueError(f"a backend named {backend.name!r} exists already")
    _backends[backend.name] = backend
    return compiler_fn


def list_backends(exclude_tags: Sequence[str] | None = ("debug", "experimental")) -> list[str]:
    """The names that ``compile(backend=...)`` takes, without those that have one of the tags; None lists all.

    An installed backend that was not used yet has no tags.
    """
    excluded = frozenset(exclude_tags or ())
    known = {name for name, backend in _backends.items() if not backend.tags & excluded}
    return sorted(known | {found.name for found in _installed() if found.name not in _backends})


def resolve_backend(backend: str | GraphCompiler) -> Backend:
    """The backend of a name, or the one that a callable is.

    Raises:
        ValueError: no backend has this name; the message lists those there are.
        TypeError: neither a name nor callable.
    """
    if isinstance(backend, str):
        if backend in _backends:
            return _backends[backend]
        for found in _installed():
            if found.name == backend:
                register_backend(found.load(), name=backend)
                return _backends[backend]
        raise ValueError(unknown_name(backend, list_backends(None), "backend"))
    if callable(backend):
        return GraphBackend(_name_of(backend), backend)
    raise TypeError(f"backend must be a name or a callable, not {type(backend).__name__}")


def _name_of(compiler: GraphCompiler) -> str:
    return str(getattr(compiler, "__name__", type(compiler).__name__))


def _installed() -> Sequence[Any]:
    return tuple(entry_points(group="gradsplit.backends"))
