"""The stages of a compilation in order: the table of contents.

Stage 0 (``compiled_function``) and stage 1 (``capture``) lie before it: they find the graph. Each line below is a plain
function from one frozen type to the next; between them run the passes that ``passes`` lists. What a backend makes of a
region is its own: ``backends.generated_kernels`` goes from the region's graph to loops and kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gradsplit.compile_core import config
from gradsplit.compile_core.autograd.bound_graphs.after_host_part import AfterHostPart
from gradsplit.compile_core.autograd.bound_graphs.bind import BoundGraph, bind_autograd
from gradsplit.compile_core.autograd.bound_graphs.double_backward import differentiable_backward
from gradsplit.compile_core.autograd.bound_graphs.folded_graph import FoldedGraph, FoldedParameters
from gradsplit.compile_core.autograd.bound_graphs.stored_gradients import StoredGradients
from gradsplit.compile_core.autograd.bound_graphs.updated_inputs import updated_inputs, updating
from gradsplit.compile_core.autograd.captured_graphs.cut_around import cut_around
from gradsplit.compile_core.autograd.captured_graphs.cut_at_results import cut_at_results
from gradsplit.compile_core.autograd.captured_graphs.fake_values import note_fake_values
from gradsplit.compile_core.autograd.captured_graphs.held_inputs import held_inputs, is_compared
from gradsplit.compile_core.autograd.captured_graphs.host_part import host_part
from gradsplit.compile_core.autograd.captured_graphs.pieces import Piece, link_pieces
from gradsplit.compile_core.autograd.captured_graphs.unnoticed_changes import refuse_changes_of_what_is_saved
from gradsplit.compile_core.autograd.captured_graphs.without_wrappers import without_wrappers
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.numbers_to_tensors import (
    as_tensors,
    float_inputs,
    numbers_to_tensors,
)
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.autograd.tracing.captured_nodes import note_unread
from gradsplit.compile_core.backends.registry import Backend, GraphBackend, RegionBackend
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.ir.communication import may_communicate
from gradsplit.compile_core.ir.communicator import Communicator, Program
from gradsplit.compile_core.ir.data_checks import has_checks
from gradsplit.compile_core.ir.graphs import JointGraph, PartitionedGraph
from gradsplit.compile_core.ir.numbers import has_open_sizes
from gradsplit.compile_core.ir.print_graph import print_graph, print_schedule
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.tensor_spec import device_type_of
from gradsplit.compile_core.ir.verify_graphs import verify_joint, verify_partition, verify_schedule
from gradsplit.compile_core.ir.wrapper_edges import has_wrappers
from gradsplit.compile_core.lowering.decompositions.convolution_layouts import (
    eagers_layouts,
    reads_memory_order,
)
from gradsplit.compile_core.many_sizes.graph_of_many_sizes import GraphOfManySizes
from gradsplit.compile_core.many_sizes.open_backend import taking_open_sizes
from gradsplit.compile_core.many_sizes.region_around_data import has_data_sizes
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.measure_steps import watch
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.passes import CAPTURED_PASSES, JOINT_PASSES, GraphChoices, run_passes
from gradsplit.compile_core.run_record import record
from gradsplit.compile_core.runtime.cuda_graphs import with_cuda_graphs
from gradsplit.compile_core.runtime.executable import Executable, link
from gradsplit.compile_core.runtime.graphed_program import MOST_AT_ONCE
from gradsplit.compile_core.torch_facts.fakes_like import fakes_like
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast

logger = logging.getLogger(__name__)


class SchedulePlanner(Protocol):
    """What data parallelism supplies: when the pieces of a backward run, and who reduces their gradients.

    Attributes:
        in_flight: how many forwards may have run whose backward is still to come.
    """

    in_flight: int

    def plan_backward(
        self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]
    ) -> tuple[Schedule, Communicator | None]:
        """The backward of ``graph``, traced for the real ``inputs``, in segments, and whose destinations it stores
        gradients in. Gradients that it returns are autograd's to deliver."""
        ...

    def backward_program(self, graph: PartitionedGraph, forward: Program, backward: Program) -> Program:
        """What autograd's engine runs: the compiled backward of ``graph``, or something in its place."""
        ...

    def compiling(self, what: str, /) -> AbstractContextManager[Any]:
        """While this process compiles in the middle of a step, and others may wait for it."""
        ...


@dataclass(frozen=True)
class CompiledGraph:
    """A captured graph that went through all stages, called with its inputs: tensors, and numbers if it takes some.

    Attributes:
        floats: positions of inputs that the programs get as tensors of one element.
    """

    run: BoundGraph
    forward: Executable
    backward: Executable | None
    partitioned: PartitionedGraph
    floats: frozenset[int] = frozenset()

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        if self.floats:
            # They take ever new values, as a learning rate does.
            inputs = as_tensors(inputs, self.floats)
        return self.run(*inputs)

    @property
    def programs(self) -> tuple[CompiledGraph, ...]:
        """Itself; see ``GraphOfManySizes``."""
        return (self,)


def compile_graph(
    captured: CapturedGraph,
    inputs: Sequence[Any],
    *,
    backend: Backend,
    options: CompileOptions,
    planner: SchedulePlanner | None = None,
) -> Callable[..., Sequence[torch.Tensor]]:
    """Stages 2 to 8: a captured graph becomes a callable of its inputs; see ``compile_module``."""
    examples = [entry.example for entry in captured.inputs]
    options = replace(options, **captured.required_options)
    # Limit: a planner's parameters get gradients.
    is_frozen = options.freezing and planner is None
    held = held_inputs(captured.inputs, inputs) if is_frozen else frozenset[int]()
    options = replace(options, freezing=bool(held))
    return compile_module(
        captured.module,
        examples,
        inputs,
        backend=backend,
        options=options,
        planner=planner,
        held=held,
        may_fail=captured.end_at_data is not None,
    )


def compile_module(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    inputs: Sequence[Any],
    *,
    backend: Backend,
    options: CompileOptions,
    planner: SchedulePlanner | None = None,
    held: frozenset[int] = frozenset(),
    may_fail: bool = False,
) -> Callable[..., Sequence[torch.Tensor]]:
    """Stages 2 to 8 for a graph of torch-level operations that returns a flat tuple of tensors.

    A graph that a stage has no rule for is cut around what cannot be traced; what then is left without a rule runs with
    torch's own kernels, with the reason logged.

    Args:
        examples: a fake tensor for each placeholder, or a SymInt or float for a number. Whoever calls the result sees
            to the conditions that the stages add to the ShapeEnv of open sizes.
        inputs: the real tensors and numbers of the first call.
        held: positions of those that stay as they are from call to call.
        may_fail: the graph is captured in another way where it does not go through all stages as a whole.

    Raises:
        Unsupported: a stage has no rule for a graph that ``may_fail``.
        Exception: what the backend raises, unless ``config.suppress_errors``.
    """
    try:
        if may_fail and has_checks(module.graph) and may_communicate(module):
            raise Unsupported("data-beside-collectives", "what is assumed of data may fail on one rank alone")
        if isinstance(backend, GraphBackend):
            with timed("backend"):
                compiled = backend.compile(module, list(examples))
                if not callable(compiled):
                    raise TypeError(f"a backend returns what runs the graph, not {compiled!r}")
                return compiled
        note_fake_values(module, examples)
        plain = without_wrappers(module, examples)
        if plain is not None:
            if planner is not None:
                raise Unsupported("planned-wrappers", "parameters that wrap tensors are not planned for")
            run = compile_module(
                plain.module,
                plain.examples,
                plain.edges.parts(inputs),
                backend=backend,
                options=options,
                # Run with torch's own kernels, the graph is the one of the wrappers.
                may_fail=True,
            )
            return plain.edges.around(run)
        refuse_changes_of_what_is_saved(module)
        pieces = cut_at_results(module, examples) if options.linked_results else []
        if len(pieces) > 1:
            if may_fail:
                # An earlier piece would have changed inputs by the time that a later one finds a check to fail.
                raise Unsupported("linked-results", "data are read in a graph that is computed in pieces")
            return compile_pieces(module, pieces, backend=backend, options=options)
        return compile_stages(
            module, examples, inputs, backend=backend, options=options, planner=planner, held=held
        )
    except (Unsupported, GuardOnDataDependentSymNode) as reason:
        if may_fail:
            raise
        # Limits: a planner's graph is one, of which it knows all parameters; wrappers are not handed on between pieces.
        may_be_cut = planner is None and not has_wrappers(module)
        if may_be_cut and _is_failed_trace(reason) and isinstance(backend, RegionBackend):
            pieces = cut_around(module, examples, lambda piece: _is_traceable(piece, backend, options))
            if pieces:
                return compile_pieces(module, pieces, backend=backend, options=options, gives_back_draws=True)
        logger.warning("%s with torch's own kernels: %s", _what_runs(module), reason)
        record("fallback", lambda reason=reason: {"reason": str(reason)})
        return module
    except Exception as error:
        if may_fail or not config.suppress_errors:
            error.add_note(f"raised while the backend {backend.name!r} compiled a graph")
            raise
        logger.warning(
            "a graph runs with torch's own kernels: the backend %r failed", backend.name, exc_info=True
        )
        return module


def _is_failed_trace(reason: Exception) -> bool:
    return isinstance(reason, Unsupported) and reason.reason_id == "trace-failed"


def _is_traceable(module: torch.fx.GraphModule, backend: RegionBackend, options: CompileOptions) -> bool:
    examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    try:
        _trace(module, examples, backend, options, StageDump(None, None))
    except Unsupported as reason:
        return not _is_failed_trace(reason)
    return True


def _what_runs(module: torch.fx.GraphModule) -> str:
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
    return f"a call of {calls[0].target} runs" if len(calls) == 1 else "a graph runs"


def compile_pieces(
    module: torch.fx.GraphModule,
    pieces: Sequence[Piece],
    *,
    backend: Backend,
    options: CompileOptions,
    gives_back_draws: bool = False,
) -> Callable[..., Sequence[torch.Tensor]]:
    """Stages 2 to 8 for each piece that ``module`` was cut into, and what runs them one after the other."""
    # Planners tell parameters by identity, and of later pieces there are no real inputs.
    runs = []
    for piece in pieces:
        examples = [node.meta["example_value"] for node in piece.module.graph.find_nodes(op="placeholder")]
        inputs = fakes_like(examples, value_at_compilation)
        runs.append(compile_module(piece.module, examples, inputs, backend=backend, options=options))
    return link_pieces(module, pieces, runs, gives_back_draws)


def compile_stages(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    inputs: Sequence[Any],
    *,
    backend: RegionBackend,
    options: CompileOptions,
    planner: SchedulePlanner | None,
    held: frozenset[int] = frozenset(),
) -> CompiledGraph | GraphOfManySizes | FoldedGraph | AfterHostPart:
    """The stages proper; see ``compile_module``."""
    parts = host_part(module, examples) if options.cuda_graphs and planner is None else None
    if parts is not None:
        examples = [node.meta["example_value"] for node in parts.device.graph.find_nodes(op="placeholder")]
        taken = parts.device_inputs
        inputs = [inputs[position] for position in taken]
        inputs += fakes_like(examples[len(taken) :], value_at_compilation)
        held = frozenset(taken.index(position) for position in held if position in taken)
        compiled = compile_stages(
            parts.device, examples, inputs, backend=backend, options=options, planner=planner, held=held
        )
        return AfterHostPart(parts, compiled)
    dump = StageDump(options.text_folder, options.diagram_folder)
    dump("captured", print_graph, module)
    backend.prepare(device_type_of(examples))
    joint, choices = _trace(module, examples, backend, options, dump, held)
    dump("joint", print_graph, joint.module, "aot_graphs")
    if options.verify:
        verify_joint(joint)
    # The trace has the program's casts; from here on an autocast around it would be one too many.
    with without_autocast():
        joint = run_passes(JOINT_PASSES, joint, choices, dump, "joint", options)
        with timed("partition"):
            graph = partition(joint, options.activation_memory_budget)
        if options.verify:
            verify_partition(joint, graph)

    count, parameters = len(inputs), None
    if joint.folded is not None:
        parameters = FoldedParameters(joint.folded, is_compared)
        inputs = [*inputs, *parameters.values_for(inputs)]

    again = differentiable_backward(module, joint) if options.double_backward and joint.tangents else None
    floats: frozenset[int] = frozenset()
    # What a CUDA graph recorded has its sizes for good.
    graph_by_graph = options.cuda_graphs and has_open_sizes(graph.forward)
    if graph_by_graph or not backend.takes_floats:
        floats = float_inputs(graph)
        if again is not None and floats:
            raise Unsupported(
                "double-backward", "gradients of a graph that takes numbers are to be differentiated"
            )
        graph = numbers_to_tensors(graph)
    modules = [graph.forward, *([] if graph.backward is None else [graph.backward])]
    if options.cuda_graphs and any(map(has_data_sizes, modules)):
        logger.warning("a graph runs without a CUDA graph: sizes in it depend on data")
        options, graph_by_graph = replace(options, cuda_graphs=False), False
    if not graph_by_graph:
        backend = taking_open_sizes(backend, nullcontext if planner is None else planner.compiling)

    @without_autocast()
    def compile_programs(graph: PartitionedGraph, inputs: Sequence[Any]) -> CompiledGraph:
        """Stages 4 to 8."""
        # A backward that is differentiated runs the graph again, on the values of before.
        updated = updated_inputs(graph) if again is None else {}
        schedule = whole_schedule("forward", graph.forward, updated, graph.num_outputs)
        finish_forward = _start_regions(schedule, backend, options, dump)
        finish_backward = stored = None
        if graph.backward is not None:
            # Gradients with a history are autograd's.
            schedule, communicator = _plan_backward(graph, inputs, planner if again is None else None)
            finish_backward = _start_regions(schedule, backend, options, dump)
            stored = StoredGradients.of(graph, schedule, communicator)
        forward = finish_forward()
        forward.observer = watch(dump.number)
        backward = None if finish_backward is None else finish_backward()
        run_forward, run_backward = updating(forward, graph, updated), backward
        if options.cuda_graphs:
            changed = tuple(updated.values())
            run_forward, run_backward = with_cuda_graphs(
                graph,
                run_forward,
                backward,
                changed,
                at_once=MOST_AT_ONCE if planner is None else planner.in_flight,
                allocating=forward,
            )
        if planner is not None and run_backward is not None:
            run_backward = planner.backward_program(graph, run_forward, run_backward)
        bound = bind_autograd(
            graph, run_forward, run_backward, again, updated, stored, own_nodes=options.linked_results
        )
        return CompiledGraph(bound, forward, backward, graph)

    run: CompiledGraph | GraphOfManySizes
    if not graph_by_graph:
        run = replace(compile_programs(graph, inputs), floats=floats)
    else:
        run = GraphOfManySizes(
            graph,
            compile_programs,
            floats,
            lambda *given: module(*given[:count]),
            must_compile=planner is not None,
        )
        run.compiled_for(inputs)
    return run if parameters is None else FoldedGraph(run, parameters)


def _trace(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    backend: RegionBackend,
    options: CompileOptions,
    dump: StageDump,
    held: frozenset[int] = frozenset(),
) -> tuple[JointGraph, GraphChoices]:
    """Stage 2 with the passes before it, and what decides on those after it."""
    decompositions = backend.decompositions(device_type_of(examples), options)
    choices = GraphChoices(
        makes_random_numbers=backend.makes_random_numbers and not options.fallback_random,
        pads_products=backend.aligns_products and options.shape_padding,
        chunk_bytes=options.chunk_bytes if backend.keeps_order else 0,
        held=held,
        packs_weights=backend.packs_weights,
    )
    if choices.makes_random_numbers:
        decompositions = {**decompositions, **random_decompositions.DECOMPOSITIONS}
    # The passes know what operators of plain tensors do.
    passes = () if has_wrappers(module) else CAPTURED_PASSES
    note_unread(module)
    program = run_passes(passes, module, choices, dump, "captured", options)
    with timed("trace_joint"):
        joint = trace_joint(program, examples, decompositions)
        if reads_memory_order(joint.module.graph, choices.makes_random_numbers):
            with eagers_layouts():
                joint = trace_joint(program, examples, decompositions)
    return joint, choices


def _plan_backward(
    graph: PartitionedGraph, inputs: Sequence[Any], planner: SchedulePlanner | None
) -> tuple[Schedule, Communicator | None]:
    assert graph.backward is not None
    if planner is None:
        return whole_schedule("backward", graph.backward), None
    with timed("plan_backward"):
        return planner.plan_backward(graph, inputs)


def _start_regions(
    schedule: Schedule, backend: RegionBackend, options: CompileOptions, dump: StageDump
) -> Callable[[], Executable]:
    """Starts to compile all regions of a schedule; what it returns waits for them and links them."""
    dump(schedule.name, print_schedule, schedule, "schedule")
    if options.verify:
        verify_schedule(schedule)
    started = {compute.name: backend.compile_region(compute, options, dump) for compute in schedule.computes}
    return lambda: link(schedule, {name: finish() for name, finish in started.items()})
