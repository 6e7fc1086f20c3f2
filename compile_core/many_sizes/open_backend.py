"""A backend that takes open sizes, made of one that knows static sizes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from gradsplit.compile_core.backends import aot_eager
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.ir.numbers import has_open_sizes
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.many_sizes.region_around_data import compile_around_data, has_data_sizes
from gradsplit.compile_core.many_sizes.region_of_many_sizes import RegionOfManySizes
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.rare_collections import rare_collections
from gradsplit.compile_core.runtime.executable import Region


def taking_open_sizes(
    backend: RegionBackend, announce: Callable[[str], AbstractContextManager[Any]]
) -> RegionBackend:
    """The backend, which compiles a region with open sizes for each combination that comes, and around operators whose
    sizes depend on data.

    Args:
        announce: see ``RegionOfManySizes``.
    """
    if backend.takes_open_sizes:
        return backend

    def compile_region(compute: Compute, options: CompileOptions, dump: StageDump) -> Callable[[], Region]:
        if not has_open_sizes(compute.module):
            return backend.compile_region(compute, options, dump)
        if has_data_sizes(compute.module):
            return compile_around_data(
                compute,
                lambda known: compile_region(known, options, dump),
                lambda apart: _started(_collecting_rarely(aot_eager.compile_region(apart, options, dump)())),
            )
        region = RegionOfManySizes(
            compute,
            lambda static: backend.compile_region(static, options, dump),
            _collecting_rarely(aot_eager.compile_region(compute, options, dump)()),
            lambda graph, signature: (
                backend.compile_elsewhere(graph, signature, compute.module, options)
                if options.compile_elsewhere
                else None
            ),
            announce,
        )
        return region.start()

    return replace(backend, compile_region=compile_region, takes_open_sizes=True)


def _started(region: Region) -> Callable[[], Region]:
    return lambda: region


def _collecting_rarely(region: Region) -> Region:
    """A region whose calls make a tensor for each operator, which all die with the step: what Python's search for
    garbage counts as new, until it looks through the whole program."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        with rare_collections():
            return region(arguments)

    return run
