"""The node that a compiled graph is in autograd's graph.

Its forward runs one program and saves what the other needs, its backward runs the other. The call of a small graph
costs little more than what is done here, so whatever is the same for all calls is worked out beforehand.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsplit.compile_core.autograd.bound_graphs.absent_hooks import HooksOfResult, spare_leaves
from gradsplit.compile_core.autograd.bound_graphs.arriving_gradients import (
    ArrivalFlags,
    are_batched,
    as_specified,
    batched_as_specified,
)
from gradsplit.compile_core.autograd.bound_graphs.changeable_values import ChangeableValues
from gradsplit.compile_core.autograd.bound_graphs.double_backward import (
    DifferentiableBackward,
    undifferentiable,
)
from gradsplit.compile_core.autograd.bound_graphs.independent_results import IndependentResults
from gradsplit.compile_core.autograd.bound_graphs.later_changes import LaterChanges
from gradsplit.compile_core.autograd.bound_graphs.replaced_memory import ViewedInputs
from gradsplit.compile_core.autograd.bound_graphs.separate_results import SeparateResults
from gradsplit.compile_core.autograd.bound_graphs.stored_gradients import StoredGradients
from gradsplit.compile_core.autograd.operators.gradient_sources import (
    Sources,
    missing_sources,
    results_of,
)
from gradsplit.compile_core.ir.bit_sets import bit_set, is_within, members
from gradsplit.compile_core.ir.communicator import Destinations, Program, WantedValues
from gradsplit.compile_core.ir.graphs import GraphSignature, PartitionedGraph, resolve_spec
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.pick import Pick, picker
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.compile_core.torch_facts.apart_from_torch_compile import apart_from_torch_compile
from gradsplit.compile_core.torch_facts.autograd_engine import (
    are_transforms_active,
    graph_task_keeps_graph,
    is_wanted,
    register_hook_dict,
)
from gradsplit.compile_core.torch_facts.thread_state import is_any_autocast_enabled
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast


@dataclass(frozen=True)
class DifferentiableProgram:
    """The two programs of a graph, and what passes between them and autograd.

    Attributes:
        saved_tensors: how many tensors are saved.
        saved_numbers: how many numbers.
        pick_saved: finds both, in this order, among what the forward computed for the backward and the primals.
        viewed: the inputs among what is saved that are to keep the memory which they have in the forward.
        constant_outputs: positions of the outputs that take no gradient.
        pick_gradients: finds what the node returns, among the gradients that were computed and a ``None``.
        tensor_inputs: positions of the primals that are no numbers.
        changed: positions of the primals that the program changes.
        unread: positions of those that no gradient leads to.
        restored: what was saved, for those who are not ``backward``, which knows what ``forward`` kept to itself.
        stored: the gradients that the backward stores for a communicator, instead of returning them.
        flags: what the backward is told of gradients that do not arrive.
        changeable: what is saved that may be changed where nothing that is asked for is computed from it.
        later: what is saved that plain PyTorch does not save.
        own_nodes: each result has a node of its own in any case.
    """

    forward: Program
    backward: Program
    backward_module: torch.fx.GraphModule
    differentiable_backward: DifferentiableBackward | None
    signature: GraphSignature
    num_outputs: int
    saved_tensors: int
    saved_numbers: int
    pick_saved: Pick
    viewed: ViewedInputs | None
    constant_outputs: tuple[int, ...]
    pick_gradients: Pick
    tensor_inputs: tuple[int, ...]
    changed: frozenset[int]
    unread: frozenset[int]
    restored: Callable[[list[Any]], list[Any]]
    stored: StoredGradients | None
    flags: ArrivalFlags
    changeable: ChangeableValues | None
    later: LaterChanges | None
    own_nodes: bool

    @staticmethod
    def of(
        graph: PartitionedGraph,
        forward: Program,
        backward: Program,
        differentiable_backward: DifferentiableBackward | None,
        updated: Mapping[int, int],
        stored: StoredGradients | None,
        own_nodes: bool,
    ) -> DifferentiableProgram:
        assert graph.backward is not None
        signature = graph.signature
        # What is to be differentiated again needs all that was saved.
        is_in_parts = differentiable_backward is None and (
            len(signature.tangents) > 1 or len(signature.gradient_inputs) > 1
        )
        changed = frozenset(mutation.input for mutation in signature.mutated)
        undefined = {signature.gradient_inputs[k] for k in signature.left_undefined}
        found = zip(signature.gradient_inputs, graph_results(graph.backward), strict=True)
        primals = [node.name for node in graph.forward.graph.find_nodes(op="placeholder")]
        numbers = {node.name for node in graph.forward.graph.nodes if is_number(node)}
        computed = [name for name in graph.saved if name not in primals]
        places = {name: k for k, name in enumerate([*computed, *primals])}
        saved_numbers = sum(name in numbers for name in graph.saved)
        tensors = graph.num_outputs - signature.open_sizes
        gradients = {position: k for k, position in enumerate(signature.gradient_inputs)}
        # The first gradient is that of the program itself, as the node counts its inputs.
        returned = [-1, *(gradients.get(k, -1) for k in range(len(primals)))]
        if stored is not None:
            returned = [-1, -1, -1, *(gradients[position] for position in stored.others)]
        return DifferentiableProgram(
            forward=forward,
            backward=backward,
            backward_module=graph.backward,
            differentiable_backward=differentiable_backward,
            signature=signature,
            num_outputs=graph.num_outputs,
            saved_tensors=len(graph.saved) - saved_numbers,
            saved_numbers=saved_numbers,
            pick_saved=picker([places[name] for name in graph.saved]),
            viewed=ViewedInputs.of(graph),
            constant_outputs=tuple(
                k for k in range(tensors) if k not in signature.tangents and k not in updated
            ),
            pick_gradients=picker(returned),
            tensor_inputs=tuple(k for k, name in enumerate(primals) if name not in numbers),
            changed=changed,
            unread=frozenset(k for k, gradient in found if gradient is None) - undefined,
            restored=getattr(backward, "restored", list),
            stored=stored,
            flags=ArrivalFlags.of(graph),
            changeable=ChangeableValues.of(graph) if is_in_parts else None,
            later=None if hasattr(backward, "restored") else LaterChanges.of(graph),
            own_nodes=own_nodes,
        )

    def __call__(self, primals: tuple[Any, ...]) -> tuple[Any, ...]:
        """The graph's outputs, in autograd's graph."""
        if self.unread:
            # Autograd's engine would go on to them with nothing: to a history in which not every operator has a
            # derivative, and through this node if a caller asks for their gradients alone.
            primals = tuple(
                # Requiring gradients: the results may do so though none leads to any input.
                primal.detach().requires_grad_() if k in self.unread and primal.requires_grad else primal
                for k, primal in enumerate(primals)
            )
        if are_transforms_active():
            return CompiledCall.apply(self, *primals)
        if self.stored is not None:
            return _apply(self, primals, self.stored.anchor, *self.stored.pick_others(primals))
        outputs = _apply(self, *primals)
        separate = self.separate
        if separate is not None and separate.matter_for(primals):
            return separate.separate(outputs, primals)
        return outputs

    @functools.cached_property
    def separate(self) -> SeparateResults | None:
        """Limit: none if gradients are stored or to be differentiated, which needs one node."""
        if self.changeable is None or self.stored is not None or len(self.signature.tangents) == 1:
            return None
        every = frozenset(self.signature.tangents)
        of_inputs = dict(zip(self.tensor_inputs, self.results_of_edges(), strict=True))
        of_inputs = {k: of_inputs[k] for k in self.signature.gradient_inputs}
        return SeparateResults.of(
            self.signature.tangents,
            {k: every if of is None else of for k, of in of_inputs.items()},
            get_zeros=bool(self.all_sources >> len(every)),
            own_nodes=self.own_nodes,
        )

    @functools.cached_property
    def independent(self) -> IndependentResults | None:
        """The results that a backward through others leaves as they are. Limit: none if gradients are stored, which
        is done once."""
        if self.changeable is None or self.stored is not None:
            return None
        return IndependentResults.of(self.changeable.graph)

    @functools.cached_property
    def all_sources(self) -> Sources:
        """What any gradient depends on."""
        return functools.reduce(operator.or_, self.signature.gradient_tangents, 0)

    def edges_without(self, missing: Sources) -> list[int]:
        """The edges to which no gradient comes where these do not arrive."""
        every = (1 << len(self.signature.tangents)) - 1
        edges = self._edges if is_within(every, missing) else self._edges_of_few
        return [edge for edge, of in edges if is_within(of, missing)]

    def results_of_edges(self) -> list[frozenset[int] | None]:
        """For each edge of the node, which are those of its tensors, the results that its gradient depends on; ``None``
        where that is not for the results to say."""
        tangents = self.signature.tangents
        return [
            None if of is None else frozenset(tangents[k] for k in members(results_of(of, len(tangents))))
            for of in self._sources_of_edges
        ]

    @functools.cached_property
    def _edges(self) -> list[tuple[int, Sources]]:
        return [(edge, of) for edge, of in enumerate(self._sources_of_edges) if of is not None]

    @functools.cached_property
    def _edges_of_few(self) -> list[tuple[int, Sources]]:
        """The edges of the node whose gradients depend on some results only."""
        count = len(self.signature.tangents)
        return [(edge, of) for edge, of in self._edges if results_of(of, count) != (1 << count) - 1]

    @functools.cached_property
    def _sources_of_edges(self) -> list[Sources | None]:
        signature = self.signature
        # An unread leaf has an edge, too, to which no result leads.
        found: dict[int, Sources] = dict.fromkeys(self.unread, 0)
        found |= {
            position: sources
            for position, sources in zip(signature.gradient_inputs, signature.gradient_tangents, strict=True)
            if sources
        }
        if self.stored is not None:
            return [None, *map(found.get, self.stored.others)]
        return [*map(found.get, self.tensor_inputs)]

    def differentiate(
        self,
        saved: list[Any],
        arriving: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        wanted: WantedValues,
        destinations: Destinations | None,
        missing: Sources,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients as values, where gradients are off. The list of saved values is emptied.

        Args:
            wanted: gradients to be returned that are stored otherwise; if there are any, nothing is stored.
            destinations: of a backward that stores gradients.
            missing: what does not come.
        """
        specs = self.signature.tangent_specs
        if sizes:
            specs = [resolve_spec(spec, sizes) for spec in specs]
        flags = self.flags.without(missing)
        is_batched = are_batched(arriving)
        if is_batched or wanted:
            # Only torch's own kernels can take what is batched, and the program would store.
            module = self.backward_module
            if self.stored is not None and wanted:
                module = self.stored.only_wanted(module, frozenset(wanted))
            tangents = map(batched_as_specified if is_batched else as_specified, arriving, specs)
            return call_program(
                lambda inputs: module.forward(*inputs), [*self.restored(saved), *tangents, *flags]
            )
        saved += map(as_specified, arriving, specs)
        saved += flags
        if destinations is None:
            return call_program(self.backward, saved)
        return call_program(functools.partial(self.backward, destinations=destinations), saved)


class CompiledCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: DifferentiableProgram, *given: Any) -> tuple[Any, ...]:
        primals = given
        if program.stored is not None:
            primals = given[0]
            program.stored.communicator.expect(ctx, program.stored.names)
        results = call_program(program.forward, [*primals])
        count = program.num_outputs
        open_sizes = program.signature.open_sizes
        outputs = standalone_outputs(results[:count], open_sizes)
        saved = program.pick_saved((*results[count:], *primals))
        ctx.numbers = ctx.sizes = ()
        if program.saved_numbers or open_sizes:
            ctx.numbers = saved[program.saved_tensors :]
            ctx.sizes = outputs[count - open_sizes :]
            saved = saved[: program.saved_tensors]
        if program.later is not None and program.later.calls_left:
            saved, ctx.watched = program.later.copy(saved)
        if program.viewed is not None:
            ctx.memories = program.viewed.memories(saved)
        if program.differentiable_backward is not None:
            ctx.number_primals = [None if isinstance(given, torch.Tensor) else given for given in primals]
            saved += tuple(
                primal.clone() if k in program.changed else primal
                for k, primal in enumerate(primals)
                if isinstance(primal, torch.Tensor)
            )
        if program.changeable is not None:
            ctx.noted = program.changeable.note(saved)
        ctx.save_for_backward(*saved)
        ctx.program = program
        ctx.set_materialize_grads(False)
        if program.constant_outputs:
            ctx.mark_non_differentiable(*(outputs[k] for k in program.constant_outputs))
        return outputs

    @staticmethod
    @apart_from_torch_compile
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program: DifferentiableProgram = ctx.program
        signature = program.signature
        arriving = [gradients[k] for k in signature.tangents]
        absent = bit_set(k for k, gradient in enumerate(arriving) if gradient is None)
        idle = _idle(ctx, absent) if absent else 0
        missing = missing_sources(absent, idle, len(arriving))
        without = {signature.tangents[k] for k in members(absent)}
        stored, destinations = program.stored, None
        wanted: WantedValues = {}
        if stored is not None:
            wanted = stored.communicator.wanted_values(stored.names)
            destinations = None if wanted else stored.begin(ctx, without)
        if absent and isinstance(ctx, CompiledCall._backward_cls):  # type: ignore[attr-defined]
            spare_leaves(ctx, program.edges_without(missing))
        if len(without) == len(arriving) and is_within(program.all_sources, missing):
            if stored is not None and destinations is not None:
                destinations.arrived(stored.names, None)
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            found = _gradients_with_history(ctx, arriving, wanted, destinations, missing, idle)
        else:
            # A backward that needs nothing can be run as often as one likes.
            saved = [*_saved_tensors(ctx, idle)[: program.saved_tensors]] if program.saved_tensors else []
            if program.viewed is not None:
                program.viewed.restore(saved, ctx.memories)
            saved += ctx.numbers
            # What is saved lives on until the backward returns, unless it is given up here (retain_graph keeps it).
            ctx.maybe_clear_saved_tensors()
            found = program.differentiate(saved, arriving, ctx.sizes, wanted, destinations, missing)
        if absent:
            # What only depends on gradients that did not arrive is undefined, not zero.
            found = [
                None if sources and is_within(sources, missing) else gradient
                for gradient, sources in zip(found, signature.gradient_tangents, strict=True)
            ]
        if stored is not None and wanted:
            stored.give_values(found, wanted)
        return program.pick_gradients((*found, None))


def _idle(ctx: Any, absent: Sources) -> Sources:
    """Of the results without a gradient those for which nothing is computed: no custom function leads to them, which
    would get zeros, or the engine does not come to them, as far as that is known. To one at least it comes."""
    program: DifferentiableProgram = ctx.program
    tangents = program.signature.tangents
    with_zeros = absent & (program.all_sources >> len(tangents))
    reached = getattr(ctx, "reached", None)
    if reached is not None:
        with_zeros &= bit_set(k for k, position in enumerate(tangents) if position in reached)
    elif program.stored is not None or absent != bit_set(range(len(tangents))):
        with_zeros = 0
    return absent & ~with_zeros


def _saved_tensors(ctx: Any, absent: Sources) -> Sequence[Any]:
    """What was saved. That it has been changed or freed is an error only where an arriving gradient depends on it, and
    that it has been changed only where it is for a gradient that is asked for."""
    program: DifferentiableProgram = ctx.program
    later = program.later
    if later is not None and later.calls_left:
        later.learn(getattr(ctx, "watched", []))
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        kept = getattr(ctx, "kept", None)
        if kept is not None and "second time" in str(error):
            found = kept.take(absent, graph_task_keeps_graph())
            if found is None:
                raise
            return found
        changeable = program.changeable
        is_of_change = "modified" in str(error) and "inplace" in str(error)
        if is_of_change and later is not None:
            later.expect()
        if changeable is None or not is_of_change:
            raise
        found = changeable.unpack(ctx._raw_saved_tensors, ctx.noted, absent, _unwanted(ctx))
        if found is None:
            raise
        return found
    independent = program.independent
    if independent is not None and independent.may_keep(absent) and not graph_task_keeps_graph():
        ctx.kept = independent.keep(saved, absent)
    return saved


def _unwanted(ctx: Any) -> frozenset[int]:
    """The gradients, by position, with which the engine goes nowhere: it was asked for others."""
    program: DifferentiableProgram = ctx.program
    if program.stored is not None:
        return frozenset()
    edges = dict(zip(program.tensor_inputs, ctx.next_functions, strict=True))
    return frozenset(
        k for k, position in enumerate(program.signature.gradient_inputs) if not is_wanted(edges[position])
    )


def edges_behind(node: Any, result: int) -> Sequence[tuple[Any, int]]:
    """Where autograd's graph leads on from a result of one of its nodes: of a compiled graph, to the inputs only that
    this result was computed from."""
    program = getattr(node, "program", None)
    if not isinstance(program, DifferentiableProgram):
        return node.next_functions
    return [
        edge
        for edge, results in zip(node.next_functions, program.results_of_edges(), strict=True)
        if results is None or result in results
    ]


def _gradients_with_history(
    ctx: Any,
    arriving: Sequence[torch.Tensor | None],
    wanted: WantedValues,
    destinations: Destinations | None,
    missing: Sources,
    idle: Sources,
) -> Sequence[torch.Tensor | None]:
    program: DifferentiableProgram = ctx.program
    kept = _saved_tensors(ctx, idle)
    if program.differentiable_backward is not None:
        tensors = iter(kept[program.saved_tensors :])
        primals = [next(tensors) if number is None else number for number in ctx.number_primals]
        return program.differentiable_backward(primals, arriving)
    with torch.no_grad():
        saved = [*kept, *ctx.numbers]
        if program.viewed is not None:
            program.viewed.restore(saved, ctx.memories)
        found = program.differentiate(saved, arriving, ctx.sizes, wanted, destinations, missing)
    sources = [tensor for tensor in (*kept, *arriving) if tensor is not None]
    return undifferentiable(found, sources, ctx)


def call_program(program: Program, arguments: list[Any]) -> Sequence[Any]:
    """Runs a program, whose casts are operations of its own, without the caller's autocast."""
    if not is_any_autocast_enabled():
        return program(arguments)
    with without_autocast():
        return program(arguments)


def standalone_outputs(outputs: Sequence[Any], open_sizes: int) -> tuple[Any, ...]:
    """The graph's outputs as tensors that autograd does not take for views: users may change results in place.

    Each shares its version counter with the original, so that a change is noticed where the original is saved. Numbers,
    which are the last, stay.
    """
    tensors = outputs[: len(outputs) - open_sizes] if open_sizes else outputs
    standalone = tuple(
        [value if value is None or not value._is_view() else value.detach() for value in tensors]
    )
    return (*standalone, *outputs[len(tensors) :]) if open_sizes else standalone


def _register_hook_dict(node: Any, result: Any) -> None:
    """What ``Tensor.register_hook`` calls when a result gets its first hook."""
    result._backward_hooks = HooksOfResult.of(result)
    register_hook_dict(node, result)


# The class of the nodes, which torch makes of the function's.
CompiledCall._backward_cls._register_hook_dict = _register_hook_dict  # type: ignore[attr-defined]

# ``Function.apply`` without the look at each argument that only functions under torch.func need.
_apply: Any = super(torch.autograd.Function, CompiledCall).apply  # type: ignore[attr-defined]
