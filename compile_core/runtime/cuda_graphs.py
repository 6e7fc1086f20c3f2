"""CUDA graphs of forward and backward: the kernels of a run are launched by one call.

The rules of what may be replayed when are in ``graphed_program``. Random operators draw from torch's generator, whose
state a CUDA graph advances as the operators would. What cannot be captured runs as it is, with the reason logged:
programs with tensors on the CPU or on several GPUs, what raises during capture, and calls under somebody else's
capture. A backward that stores gradients for a communicator is a graph for each region; see ``recorded_segments``.
"""

from __future__ import annotations

import gc
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.temporary_memory import sharing
from gradsplit.compile_core.runtime.executable import Executable
from gradsplit.compile_core.runtime.graphed_program import (
    MOST_AT_ONCE,
    GraphedProgram,
    RecordedSource,
    Recorder,
)
from gradsplit.compile_core.runtime.lent_tensors import lent_tensors
from gradsplit.compile_core.runtime.memory_lives import memory_of_both
from gradsplit.compile_core.runtime.meter_calls import CallMeter
from gradsplit.compile_core.runtime.one_piece import InOnePiece, Pieces, may_be_split, pieces_for
from gradsplit.compile_core.runtime.recorded_segments import GraphedBackward, SegmentRecorder, StoringProgram
from gradsplit.compile_core.runtime.shared_memory import SharedMemory, shared_memory
from gradsplit.compile_core.torch_facts.dispatcher import MATRIX_PRODUCTS

logger = logging.getLogger(__name__)

# Results up to this size are copied out of a graph's memory at once: programs keep losses, and a copy costs one launch.
_SMALL_BYTES = 1 << 16

_one_at_a_time = threading.Lock()
# The forwards that have a backward.
_pairs: weakref.WeakSet[GraphedProgram] = weakref.WeakSet()


@dataclass(frozen=True)
class CudaReplay:
    """Replays a graph, and holds its memory.

    Attributes:
        pool: that of the allocator's which its capture allocated from.
    """

    run: Callable[[], None]
    pool: Any

    def __call__(self) -> None:
        self.run()


class CudaRecorder:
    """Captures on a stream that is there for it.

    Torch gives cuBLAS 32 MiB for each thread on a stream, for good. On the caller's, that would be asked for amidst
    what the first step computes, and would hold the piece in which it lies. So programs that call cuBLAS run for the
    first time where they are captured, unless there are recordings, whose replays use that memory.

    Args:
        device: the GPU.
        pool: the memory of all graphs; else each has a pool of its own. Temporaries lie in ``shared_memory``.
        calls_cublas: whether what is recorded does.
        runs_anywhere: whether it may run on any stream without a recording.
    """

    def __init__(
        self,
        device: torch.device,
        pool: Any = None,
        *,
        calls_cublas: bool = False,
        runs_anywhere: bool = False,
    ) -> None:
        self._device = device
        self._calls_cublas = calls_cublas
        self._is_rehearsed = calls_cublas and runs_anywhere
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._pool = pool
        self._memory = shared_memory(self._index)

    def reason_against(self) -> str:
        return "another CUDA graph is being captured" if torch.cuda.is_current_stream_capturing() else ""

    def in_parts(self, within: CudaReplay | None = None) -> CudaRecorder:
        pool = torch.cuda.graph_pool_handle() if within is None else within.pool
        return CudaRecorder(self._device, pool, calls_cublas=self._calls_cublas)

    @property
    def lends(self) -> bool:
        return self._memory is not None  # which has all replays take turns

    def lent(self, tensors: list[torch.Tensor], replay: CudaReplay) -> list[torch.Tensor]:
        return lent_tensors(tensors, replay)

    def rehearse(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        memory = self._memory
        if self._is_rehearsed and memory is not None:
            with _stream_alone(self._index) as stream:
                if not memory.is_recorded_in:
                    return _run_on(stream, memory, program, inputs)
        return program(inputs)

    def record(
        self, program: Program, inputs: list[torch.Tensor], within: CudaReplay | None = None
    ) -> tuple[CudaReplay, Sequence[Any]]:
        memory = self._memory
        pool = self._pool if within is None else within.pool
        if memory is not None:
            program = sharing(program, memory)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._index]
        state = generator.clone_state()
        with _one_at_a_time, torch.cuda.device(self._index), _stream_alone(self._index) as stream:
            if memory is not None:
                memory.is_recorded_in = True
            torch.cuda.synchronize()
            # During a capture the allocator gives nothing back of what it keeps, and may find no memory for the graph.
            torch.cuda.empty_cache()
            # What the collector frees might ask the driver for what it forbids during a capture.
            collecting = gc.isenabled()
            gc.disable()
            try:
                # Before a capture torch writes there from where recordings draw random numbers, and before a replay on
                # the stream of that, to the same place.
                turn = nullcontext() if memory is None else memory.turn_of(stream)
                with turn, torch.cuda.stream(stream):
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        if memory is not None and self._calls_cublas:
                            memory.have_workspace()
                        results = program(inputs)
                    finally:
                        try:
                            if memory is not None:
                                memory.leave()
                        finally:
                            graph.capture_end()
                if memory is not None:
                    memory.check_apart(results)
            except Exception:
                # Else the generator believes that the capture goes on.
                generator.graphsafe_set_state(state)
                raise
            finally:
                if collecting:
                    gc.enable()
                torch.cuda.current_stream().wait_stream(stream)
        return CudaReplay(
            graph.replay if memory is None else memory.in_turn(graph.replay), graph.pool()
        ), results

    def follow(self, stream: Any) -> Any:
        current = torch.cuda.current_stream(self._device)
        if stream is not None and stream != current:
            current.wait_stream(stream)
        return current


def _run_on(
    stream: torch.cuda.Stream, memory: SharedMemory, program: Program, inputs: list[Any]
) -> Sequence[Any]:
    """What the current stream computed is ready by then, and the results are for what it computes next."""
    current = torch.cuda.current_stream(stream.device)
    _note_use(inputs, stream)
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        stream.wait_stream(current)
        try:
            with _one_at_a_time:
                memory.have_workspace()
            results = program(inputs)
        finally:
            current.wait_stream(stream)
    _note_use(results, current)
    return results


@contextmanager
def _stream_alone(index: int) -> Iterator[torch.cuda.Stream]:
    """A stream of a GPU that nobody else gets meanwhile, and the same each time if nobody asks meanwhile: cuBLAS keeps
    32 MiB for each that it has seen."""
    idle = _idle_streams(index)
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream(index)
    try:
        yield stream
    finally:
        idle.append(stream)


@cache
def _idle_streams(index: int) -> list[torch.cuda.Stream]:
    return []


def _note_use(values: Sequence[Any], stream: torch.cuda.Stream) -> None:
    """Where these lie nothing else does, once they are freed, before a stream has done what it was given by then."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            # Not a change of the tensor.
            value.data.record_stream(stream)


def with_cuda_graphs(
    graph: PartitionedGraph,
    forward: Program,
    backward: Executable | None,
    changed: Sequence[int] = (),
    at_once: int = MOST_AT_ONCE,
    allocating: Executable | None = None,
) -> tuple[Program, Program | None]:
    """The programs of ``graph``, replayed as CUDA graphs where that is possible; ``forward`` changes some inputs.

    Args:
        allocating: what of ``forward`` computes, if that is known.
        at_once: how many runs may be recorded whose results are in use.
    """
    if not torch.cuda.is_available():
        _report_no_cuda()
        return forward, backward
    if not launches_kernels(graph.forward):
        return forward, backward  # an empty recording would be the first launch
    reason = reason_against(graph.forward)
    if reason:
        logger.warning("the forward is not captured as a CUDA graph: %s", reason)
        return forward, backward
    device = next(_devices(graph.forward))
    modules = [graph.forward, *([] if graph.backward is None else [graph.backward])]
    recorder = CudaRecorder(
        device,
        calls_cublas=any(map(_calls_cublas, modules)),
        runs_anywhere=all(map(runs_on_any_stream, modules)),
    )
    if backward is not None and graph.backward is not None:
        reason = reason_against(graph.backward)
        if reason:
            logger.warning("the backward is not captured as a CUDA graph: %s", reason)
            return graph_programs(graph, forward, None, changed, recorder, at_once)[0], backward
    return graph_programs(graph, forward, backward, changed, recorder, at_once, allocating)


def graph_programs(
    graph: PartitionedGraph,
    forward: Program,
    backward: Executable | None,
    changed: Sequence[int],
    recorder: Recorder,
    at_once: int = MOST_AT_ONCE,
    allocating: Executable | None = None,
) -> tuple[GraphedProgram, GraphedProgram | GraphedBackward | None]:
    """Forward and backward of ``graph`` as programs that ``recorder`` records."""

    meter = CallMeter()

    @cache
    def computed_pieces() -> Pieces | None:
        if backward is None or allocating is None:
            return None
        kept = _kept_positions(graph)
        memories = memory_of_both(allocating, backward, kept, graph.num_outputs, meter.taken)
        return None if memories is None else pieces_for(memories, len(_pairs))

    def pieces() -> Pieces | None:
        """Of the forward's recording for the backward's, if that may be within it."""
        if backward is None or not graphed_backward.may_overwrite:
            return None
        found = computed_pieces()
        return None if found is None or not may_be_split(found) else found

    results = graph_results(graph.forward)
    returned = {
        result if isinstance(result, int) else result.position
        for result in graph.signature.results
        if isinstance(result, int) or not result.of_input
    }
    small = {position for position in returned if _bytes_of(results[position]) <= _SMALL_BYTES}
    graphed = GraphedProgram(
        "CUDA graph of a forward",
        InOnePiece(forward, pieces, is_first=True, meter=None if backward is None else meter),
        recorder,
        graph.num_outputs,
        hides=backward is not None,
        changed=changed,
        uncounted={change.input for change in graph.signature.mutated if not change.counted},
        copied_out=small,
        at_once=at_once,
    )
    if backward is None or graph.backward is None:
        return graphed, None
    if allocating is not None:
        _pairs.add(graphed)
    num_inputs, num_stored = len(backward.schedule.inputs), len(backward.schedule.destinations)
    storing = StoringProgram(backward) if num_stored else None
    graphed_backward = GraphedProgram(
        "CUDA graph of a backward",
        storing or InOnePiece(backward, pieces, is_first=False, meter=meter),
        SegmentRecorder(recorder) if storing else recorder,
        len(graph_results(graph.backward)),
        changed=range(num_inputs, num_inputs + num_stored),
        copied_in=range(len(graph.saved), num_inputs),
        sources=[saved_source(graph, graphed)],
        at_once=at_once,
        reads_last=True,
    )
    return graphed, GraphedBackward(storing, graphed_backward) if storing else graphed_backward


def saved_source(graph: PartitionedGraph, forward: GraphedProgram) -> RecordedSource:
    """What a program that takes the inputs of the backward of ``graph`` reads of the forward's results."""
    return RecordedSource(forward, _kept_positions(graph))


def _kept_positions(graph: PartitionedGraph) -> dict[int, int]:
    """Position among the backward's inputs -> position among the forward's results."""
    primals = {node.name for node in graph_inputs(graph.forward)}
    computed = [position for position, name in enumerate(graph.saved) if name not in primals]
    return {position: graph.num_outputs + k for k, position in enumerate(computed)}


def reason_against(module: torch.fx.GraphModule) -> str:
    """Why the program of a graph cannot be captured, or ""."""
    devices = set(_devices(module))
    if any(device.type != "cuda" for device in devices):
        names = ", ".join(sorted({device.type for device in devices}))
        return f"it has tensors on: {names}"
    if len(devices) != 1:
        return f"it computes on {len(devices)} GPUs"
    return next(filter(None, map(_reason_against_node, module.graph.nodes)), "")


def launches_kernels(module: torch.fx.GraphModule) -> bool:
    """Whether a graph computes anything; one that does not makes views at most."""
    return any(
        node.op == "call_function"
        and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        and node.target not in (operator.getitem, torch.ops.aten._unsafe_view.default)
        and not any(returned.alias_info for returned in _returns(node.target))
        for node in module.graph.nodes
    )


def _calls_cublas(module: torch.fx.GraphModule) -> bool:
    return any(getattr(node.target, "overloadpacket", None) in MATRIX_PRODUCTS for node in module.graph.nodes)


def runs_on_any_stream(module: torch.fx.GraphModule) -> bool:
    """Whether all that a graph calls is torch's or ours: a user's operator may launch on the default stream always."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return all(
        target.namespace in ("aten", "prims", "gradsplit")
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__module__", "") == operator.getitem.__module__
        for target in targets
    )


def _returns(target: Any) -> Sequence[Any]:
    schema = getattr(target, "_schema", None)
    return () if schema is None else schema.returns


def _reason_against_node(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, KeptCall) and target.depends_on_data:
        return f"what {target} runs depends on data"
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.cudagraph_unsafe in target.tags:
        return f"{target} is marked as unsafe in CUDA graphs"
    return ""


def _devices(module: torch.fx.GraphModule) -> Iterator[torch.device]:
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and not (_is_constant(node) and value.numel() == 1):
                yield value.device


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether it is written into the kernels that read it, if it is a number."""
    return node.op == "get_attr" and all(user.op != "output" for user in node.users)


def _bytes_of(node: torch.fx.Node | None) -> int:
    value = None if node is None else node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@cache
def _report_no_cuda() -> None:
    logger.warning("CUDA graphs need a CUDA device, and torch sees none: programs run as in the default mode")
