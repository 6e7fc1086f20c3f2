"""Regions compiled by other processes, while this one goes on.

What Python does there would hold up whoever computes here. What is left to do here is to load kernels from the cache.
"""

from __future__ import annotations

import base64
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from gradsplit.compile_core.backends.region_transport import (
    packed,
    reason_against,
    region_request,
    unpacked,
    with_constants,
)
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import KernelSource, StartedBuild
from gradsplit.compile_core.ir.open_graphs import OpenGraph, SizeValues
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.lowering.build import start_build
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.rare_collections import rare_collections
from gradsplit.compile_core.runtime.link_program import LinkedProgram, link_program
from gradsplit.compile_core.toolchain.compile_workers import CompileWorkers, usable_processors

logger = logging.getLogger(__name__)

_PROCESSORS_A_WORKER, _MOST_WORKERS = 4, 4

Finish = Callable[[], LinkedProgram]


def compile_elsewhere(
    graph: OpenGraph, signature: Compute, module: GraphModule, options: CompileOptions
) -> Callable[[SizeValues], Future[Finish]] | None:
    """What compiles a region for some of its sizes, in another process; ``None`` where none can.

    Args:
        graph: the region's graph, that of ``module``.
        signature: the region without its numbers.

    Returns:
        A function of sizes. The future's result loads the kernels and makes the program, which takes a moment.
    """
    if options.max_autotune:
        return None  # products are timed on the GPU that they run on
    reason = reason_against(graph)
    if not reason:
        try:
            region = _text(region_request(graph, signature, module, options))
        except Exception as error:  # whatever there is that cannot be sent
            reason = str(error)
    if reason:
        logger.info("%s is compiled in this process: %s", signature.name, reason)
        return None

    def compile_for(values: SizeValues) -> Finish:
        answer = _workers.ask({"region": region, "values": _text(values)})
        if answer["error"] is not None:
            error = CompileError(answer["error"])
            error.add_note(answer["traceback"])
            raise error
        program, sources = (base64.b64decode(answer[part]) for part in ("program", "sources"))
        kernel_sources = unpacked(sources)
        # They are in the cache. Every further thread would keep the one that computes from going on.
        kernels = start_build(kernel_sources, options.cache_folder, most_threads=1)
        kernels.settle()
        return lambda: _linked(program, kernel_sources, kernels, module)

    return lambda values: _jobs.submit(lambda: compile_for(values))


def wait_for_compilations(timeout_s: float | None = None) -> bool:
    """Waits until other processes compile nothing for this one, as a benchmark does before it measures.

    What they have compiled is taken up by the next calls.

    Returns:
        Whether that came to pass in time.
    """
    return not wait(_jobs.unfinished(), timeout_s).not_done


def _linked(
    program: bytes, sources: Sequence[KernelSource], kernels: StartedBuild, module: GraphModule
) -> LinkedProgram:
    """The program of what another process made.

    Thousands of objects come and go here, at a moment when somebody waits for a step.
    """
    with rare_collections():
        with timed("build"):
            built = kernels()
        with timed("link"):
            return link_program(with_constants(unpacked(program), module), sources, built)


def _text(value: Any) -> str:
    return base64.b64encode(packed(value)).decode()


class _Jobs:
    """Runs jobs in threads that nobody waits for when the process ends."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """What was started is the parent's."""
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._threads = 0
        self._started: list[Future[Any]] = []

    def submit(self, job: Callable[[], Finish]) -> Future[Finish]:
        future: Future[Finish] = Future()
        self._started = [*self.unfinished(), future]
        self._waiting.put((job, future))
        if self._threads < max(1, min(_MOST_WORKERS, usable_processors() // _PROCESSORS_A_WORKER)):
            self._threads += 1
            threading.Thread(target=self._work, name="gradsplit-sizes", daemon=True).start()
        return future

    def unfinished(self) -> list[Future[Any]]:
        return [future for future in self._started if not future.done()]

    def _work(self) -> None:
        while True:
            job, future = self._waiting.get()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)


_workers = CompileWorkers(Path(__file__).with_name("region_worker.py"))
_jobs = _Jobs()
