"""A region with open sizes: a program for each combination of sizes that comes, and torch's kernels until it is there.

The first program is compiled with the graph. Those for other sizes are compiled in another process where the backend
can, so that no step waits for a compiler: until then the region runs as its graph says, with torch's own kernels.
Results have the same layouts either way, so that each region of a graph may change to its program between two calls,
whatever the others run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from gradsplit.compile_core import config
from gradsplit.compile_core.capture import normal_tensors
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.numbers import SYMBOLIC_NUMBERS, SizeReader
from gradsplit.compile_core.ir.open_graphs import OpenGraph, OpenTensor, SizeValues, bound_layouts
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.tensor_spec import same_strides
from gradsplit.compile_core.runtime.executable import Region

logger = logging.getLogger(__name__)

CompileRegion = Callable[[Compute], Callable[[], Region]]
# Sizes and numbers of a region -> what makes its program, when it has been compiled.
CompileElsewhere = Callable[[SizeValues], Future[Callable[[], Region]]]


class RegionOfManySizes:
    """See the module; called as a ``Region``.

    Args:
        compute: the region; its only numbers are sizes.
        compile_static: compiles a region whose sizes are static.
        torchs_region: the region with torch's own kernels.
        elsewhere: what compiles the region, given its graph and itself without numbers, in another process; ``None``
            where that cannot be.
        announce: called with what this process is about to compile, for those who wait for it meanwhile.

    Raises:
        Unsupported: what the region is given does not determine a size.
    """

    def __init__(
        self,
        compute: Compute,
        compile_static: CompileRegion,
        torchs_region: Region,
        elsewhere: Callable[[OpenGraph, Compute], CompileElsewhere | None],
        announce: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.compute = compute
        self.open_graph = OpenGraph.of(compute.module)
        self._compile_static = compile_static
        self._torchs_region = torchs_region
        self._announce = announce
        examples = [node.meta["val"] for node in graph_inputs(compute.module)]
        self._numbers = {k: name for k, name in enumerate(compute.inputs) if _is_number(examples[k])}
        self._reader = SizeReader(examples)
        unknown = self.open_graph.symbols() - {*self._reader.symbols}
        if unknown:
            raise Unsupported(
                "open-size", f"nothing that {compute.name} is given says {min(map(str, unknown))}"
            )
        results = graph_results(compute.module)
        self._result_numbers = {
            k: name for k, name in enumerate(compute.outputs) if _is_number(_value(results[k]))
        }
        self._layouts = {
            k: OpenTensor.of(value)
            for k, name in enumerate(compute.outputs)
            if name not in compute.destinations
            and isinstance(value := _value(results[k]), torch.Tensor)
            and value.layout is torch.strided
        }
        self._signature = replace(
            compute,
            inputs=tuple(name for k, name in enumerate(compute.inputs) if k not in self._numbers),
            outputs=tuple(name for k, name in enumerate(compute.outputs) if k not in self._result_numbers),
        )
        self._elsewhere = elsewhere
        self._compile_elsewhere: CompileElsewhere | None = None
        self._programs: dict[tuple[Any, ...], Region] = {}
        self._meanwhile: dict[tuple[Any, ...], Region] = {}
        # What is being compiled; ``None`` where that has failed.
        self._coming: dict[tuple[Any, ...], Future[Callable[[], Region]] | None] = {}
        self._lock = threading.RLock()
        self._limit_reported = False

    @property
    def programs(self) -> tuple[Region, ...]:
        """What was compiled, in the order in which it came."""
        return tuple(self._programs.values())

    @property
    def is_compiling(self) -> bool:
        """Whether programs are being compiled for sizes that came."""
        return any(job is not None and not job.done() for job in self._coming.values())

    def start(self) -> Callable[[], Region]:
        """Starts to compile for the sizes that the graph was traced with; what it returns waits for that."""
        examples = [node.meta["val"] for node in graph_inputs(self.compute.module)]
        numbers = (example.node.hint for example in examples if _is_number(example))
        key = (*self._reader.at_compilation, *numbers)
        values = self._values(key)
        finish = self._compile_static(self._bound_compute(values))
        # In the time in which kernels are compiled.
        self._compile_elsewhere = self._elsewhere(self.open_graph, self._signature)

        def wait() -> Region:
            self._programs[key] = self._taking_numbers(finish(), values)
            return self

        return wait

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        key = self._reader.values(arguments)
        if self._numbers:
            key = (*key, *(arguments[position] for position in self._numbers))
        program = self._programs.get(key) or self._program_for(key)
        return program(arguments)

    def _program_for(self, key: tuple[Any, ...]) -> Region:
        """What runs these sizes now, which are new or were a while ago."""
        with self._lock:
            if key in self._programs:
                return self._programs[key]
            if key not in self._coming:
                if len(self._programs) + len(self._coming) >= config.sizes_limit:
                    self._report_limit()
                    return self._with_torchs_kernels(key)
                values = self._values(key)
                if self._compile_elsewhere is None or torch.are_deterministic_algorithms_enabled():
                    return self._compile_here(key, values)
                self._coming[key] = self._compile_elsewhere(values)
            job = self._coming[key]
            # A capture must not see the memory that kernels are loaded into.
            if job is None or not job.done() or _is_capturing():
                return self._with_torchs_kernels(key)
            try:
                self._programs[key] = self._taking_numbers(job.result()(), self._values(key))
            except Exception as error:
                self._coming[key] = self._compile_elsewhere = None
                logger.warning(
                    "%s of sizes %s runs with torch's own kernels, and others are compiled in this process: %s",
                    self.compute.name,
                    list(key),
                    error,
                )
                return self._with_torchs_kernels(key)
            del self._coming[key]
            self._meanwhile.pop(key, None)
            return self._programs[key]

    def _compile_here(self, key: tuple[Any, ...], values: SizeValues) -> Region:
        with self._announce("compiles another size of a graph"), normal_tensors():
            program = self._compile_static(self._bound_compute(values))()
        self._programs[key] = self._taking_numbers(program, values)
        return self._programs[key]

    def _values(self, key: tuple[Any, ...]) -> SizeValues:
        symbols = self._reader.symbols
        numbers = dict(zip(self._numbers.values(), key[len(symbols) :], strict=True))
        return SizeValues(dict(zip(symbols, key, strict=False)), numbers)

    def _bound_compute(self, values: SizeValues) -> Compute:
        """The region for these sizes, without its numbers."""
        module, _ = self.open_graph.bind(self.compute.module, values)
        return replace(self._signature, module=module)

    def _taking_numbers(self, program: Region, values: SizeValues) -> Region:
        """A program without numbers, called with those of the region, and returning its numbers."""
        inputs = self._numbers.keys()
        results = self.open_graph.numbers(values) if self._result_numbers else {}
        returned = {k: results[name] for k, name in self._result_numbers.items()}
        if not inputs and not returned:
            return program

        def run(arguments: list[Any]) -> Sequence[Any]:
            tensors = [given for k, given in enumerate(arguments) if k not in inputs]
            arguments.clear()
            computed = [*program(tensors)]
            for position, number in returned.items():
                computed.insert(position, number)
            return computed

        return run

    def _with_torchs_kernels(self, key: tuple[Any, ...]) -> Region:
        """The region's graph, with results that lie as those of its program do."""
        found = self._meanwhile.get(key)
        if found is None:
            if len(self._meanwhile) >= config.sizes_limit:
                self._meanwhile.clear()
            layouts = bound_layouts(self._layouts, self._values(key).sizes)
            found = self._meanwhile[key] = _in_layouts(self._torchs_region, layouts)
        return found

    def _report_limit(self) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            logger.warning(
                "a graph was compiled for %d different sizes (the limit); further ones run with torch's own kernels",
                config.sizes_limit,
            )


def _in_layouts(region: Region, layouts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> Region:
    def run(arguments: list[Any]) -> Sequence[Any]:
        results = [*region(arguments)]
        for position, (shape, stride) in layouts.items():
            found = results[position]
            if not same_strides(shape, found.stride(), stride):
                results[position] = torch.empty_strided(
                    shape, stride, dtype=found.dtype, device=found.device
                ).copy_(found)
        return results

    return run


def _value(node: Any) -> Any:
    return None if node is None else node.meta["val"]


def _is_number(value: Any) -> bool:
    return isinstance(value, SYMBOLIC_NUMBERS)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
