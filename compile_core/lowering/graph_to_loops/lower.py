"""Stage 5, first half: a functional ATen graph becomes loop nests and calls of torch's kernels.

The graph is walked once in order. A pointwise operator, a view or a creation yields a lazy tensor: nothing is
emitted until something needs its elements. Reductions, concatenations and torch's own kernels emit a step at
once, inlining what they read. A lazy tensor gets memory when a torch kernel or the caller needs it there, or
when inlining it into several nests would cost more than writing it once; the fusion afterwards joins nests
over one iteration space, so such a write often disappears again.

Limits: static shapes; operators without a rule run as torch's own (see ``extern_rules.fallback_calls``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.loops import LoopProgram, View
from gradsplit.compile_core.ir.scatters import combines_at_indices
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, compute_dtype
from gradsplit.compile_core.lowering.graph_to_loops.index_rules import INDEX_RULES, SHAPE_READERS
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import (
    ProgramBuilder,
    pointwise,
    static_spec,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_calls import lower_call
from gradsplit.compile_core.lowering.graph_to_loops.lower_concatenation import (
    Concatenations,
    parts_along_last_dim,
    reduce_parts,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_plan import (
    INLINE,
    MEMORY,
    GraphPlan,
    plan_graph,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower_pooling import POOLING, lower_pooling
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Cost, Emitter, LazyTensor
from gradsplit.compile_core.lowering.graph_to_loops.reduction_rules import (
    has_positions,
    is_reduction,
    lower_reduction,
    reductions_of,
)
from gradsplit.compile_core.lowering.graph_to_loops.scalar_rules import (
    CONVERSIONS,
    OPERANDS,
    is_pointwise,
    operand_dtype,
    scalar_rule,
)
from gradsplit.compile_core.lowering.graph_to_loops.scatter_rules import lower_scatter
from gradsplit.compile_core.lowering.graph_to_loops.view_rules import (
    SPLITTING_VIEWS,
    VIEWS,
    reindex_of,
    restride,
    strided_reindex,
    view_of,
)
from gradsplit.compile_core.lowering.nests.body_builder import is_loop_dtype
from gradsplit.compile_core.torch_facts.dispatcher import KEPT

aten = torch.ops.aten

# Inlining stops at this many operations, whatever it would save: bodies must stay readable for C++ compilers.
_MOST_OPERATIONS = 150
# Of a tensor on a GPU that rather is computed again, and of how many exponentials or the like that may take.
_LARGE_BYTES = 64 << 20
_FEW_FUNCTIONS = 2
# A value with several readers is worth a write if computing it again takes as much as this.
_CHEAP_OPERATIONS = 16
# Beside a tensor of 16-bit floats torch makes such floats of them, and few are that exactly.
_LONG_INTEGERS = (torch.int16, torch.int32, torch.int64)


def lower(compute: Compute) -> LoopProgram:
    """Lowers one region.

    Returns:
        A program whose inputs are the region's (in order), followed by its destinations in the order of
        ``compute.outputs``; its outputs are views in the order of the region's, with the strides of eager's
        results (a result with a destination is the view of that buffer).

    Raises:
        Unsupported: symbolic shapes, or a result that is no tensor.
    """
    return _Lowering(compute).run()


def lower_into(
    builder: ProgramBuilder, module: torch.fx.GraphModule, inputs: Sequence[LazyTensor]
) -> list[LazyTensor]:
    """The results of a functional graph over tensors of a program under construction, as tensors of it.

    Nothing that a body can compute is given memory, however often it is computed then.

    Raises:
        Unsupported: as ``lower``.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    lowering = _Lowering(Compute("inlined", module, tuple(node.name for node in placeholders), ()), builder)
    lowering.values.update(zip(placeholders, inputs, strict=True))
    lowering.lower_nodes(GraphPlan(alive=plan_graph(graph, {}).alive))
    results: Any = graph.output_node().args[0]
    return [lowering.values[result] for result in results]


class _Lowering:
    def __init__(self, compute: Compute, builder: ProgramBuilder | None = None) -> None:
        self.compute = compute
        self.builder = builder or ProgramBuilder()
        self.values: dict[torch.fx.Node, Any] = {}
        self.elsewhere: dict[tuple[torch.fx.Node, torch.device], LazyTensor] = {}
        self.plan = GraphPlan()
        self.destination_buffers: dict[str, str] = {}
        self.input_places: dict[torch.fx.Node, View] = {}
        self.copies_to_inputs: list[tuple[torch.fx.Node, LazyTensor, str]] = []

    def run(self) -> LoopProgram:
        graph = self.compute.module.graph
        results = graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
        self.lower_nodes(plan_graph(graph, self._destinations(results)))
        outputs = tuple(self._output(result, position) for position, result in enumerate(results))
        for target, source, origin in self.copies_to_inputs:
            # Where the caller's tensor is; for its readers, it may have been copied elsewhere meanwhile.
            place = self.input_places[target]
            result = self.builder.in_memory(place, place.stride, origin)
            self.builder.call(aten.copy_.default, (result, source), {}, (None,), {}, origin)
        builder = self.builder
        return LoopProgram(
            self.compute.name,
            tuple(builder.inputs),
            tuple(builder.destinations),
            builder.buffers,
            builder.constants,
            tuple(builder.steps),
            outputs,
            kept=frozenset(k for k, name in enumerate(self.compute.outputs) if name in self.compute.kept),
        )

    def lower_nodes(self, plan: GraphPlan) -> None:
        """Gives values to the nodes of the graph but its inputs."""
        graph, self.plan = self.compute.module.graph, plan
        self.concatenations = Concatenations(self.builder, graph, self.plan)
        for node in graph.nodes:
            if node in self.plan.alive and node.op in ("call_function", "get_attr"):
                self.values[node] = self._lower_node(node)

    # -- the region's borders

    def _placeholder(self, node: torch.fx.Node) -> Any:
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor):
            raise Unsupported(
                "non-tensor-input", f"input {node.name} of a compiled region is no tensor: {fake!r}"
            )
        view = self.builder.new_buffer(node.name, static_spec(fake, node.name))
        self.builder.inputs.append(view.buffer)
        self.input_places[node] = view
        return self.builder.in_memory(view, view.stride, node.name)

    def _destinations(self, results: Sequence[Any]) -> dict[torch.fx.Node, View]:
        places: dict[torch.fx.Node, View] = {}
        for name, result in zip(self.compute.outputs, results, strict=True):
            if name not in self.compute.destinations:
                continue
            fake = result.meta["val"]
            stride = self.compute.strides_of(name, fake.shape)
            spec = TensorSpec(tuple(fake.shape), stride, fake.dtype, fake.device)
            # A parameter may be called what a node is called; the result's name is nobody else's.
            view = self.builder.new_buffer(name, spec)
            self.builder.destinations.append(view.buffer)
            self.destination_buffers[name] = view.buffer
            places.setdefault(result, view)
        return places

    def _output(self, result: Any, position: int) -> View | None:
        if result is None:
            return None
        tensor = self.values.get(result) if isinstance(result, torch.fx.Node) else result
        if not isinstance(tensor, LazyTensor):
            raise Unsupported(
                "non-tensor-output", f"result {position} of {self.compute.name} is no tensor: {result!r}"
            )
        fake = result.meta["val"]
        destination = self.destination_buffers.get(self.compute.outputs[position])
        if destination is not None:
            spec = self.builder.buffers[destination]
            wanted = View(destination, spec.shape, spec.stride)
            if tensor.located() is None:
                self.builder.realise_at(tensor, wanted)
            elif not _same_place(tensor.located(), wanted):
                self.builder.store_into(wanted, tensor)
            return wanted
        view = self.builder.realise(tensor)
        wanted = View(view.buffer, view.shape, tuple(fake.stride()), view.offset)
        return view if _same_place(view, wanted) else self._with_strides(tensor, tuple(fake.stride()))

    def _with_strides(self, tensor: LazyTensor, stride: tuple[int, ...]) -> View:
        """A copy with exactly these strides; what reads the result was compiled for them."""
        spec = TensorSpec(tensor.shape, stride, tensor.dtype, tensor.device)
        copy = self.builder.new_buffer(tensor.origin, spec)
        # along an expanded dim all elements are one
        once = [slice(0, 1) if step == 0 else slice(None) for step in stride]
        place = restride(copy, lambda t: t[tuple(once)]) if once else copy
        source = (
            restride(self.builder.realise(tensor), lambda t: t[tuple(once)]) if once else tensor.located()
        )
        assert place is not None and source is not None
        self.builder.store_into(place, self.builder.in_memory(source, source.stride, tensor.origin))
        return copy

    # -- nodes

    def _lower_node(self, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            return self._constant(node)
        args: Any = map_arg(node.args, self.values.get)
        kwargs: Any = map_arg(node.kwargs, self.values.get)
        fake: Any = node.meta.get("val")
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target is aten.copy_.default:
            target: Any = node.args[0]
            self.copies_to_inputs.append((target, args[1], node.name))
            return args[0]
        for tensor in tree_leaves(fake):
            if isinstance(tensor, torch.Tensor):
                static_spec(tensor, node.name)
        if KEPT in node.meta and not node.users:  # torch's kernel is run for what it raises
            return lower_call(self.builder, self.plan, node, args, kwargs)
        if node in self.plan.absorbed:
            return args[0] if isinstance(args[0], LazyTensor) else args[1]
        if node.target in VIEWS:
            return self._view(node, args, kwargs)
        if node.target in SPLITTING_VIEWS:
            return self._split(node, args, kwargs)
        if self.plan.use_kind(node) != MEMORY:
            if node.target not in SHAPE_READERS:
                args, kwargs = map_arg((node.args, node.kwargs), lambda source: self._here(source, node))
            if isinstance(node.target, torch._ops.OpOverload) and node.target in INDEX_RULES:
                result = INDEX_RULES[node.target](args, kwargs, fake, node.name)
                if result is not None:
                    return self._settle(node, result)
            elif is_pointwise(node.target):
                result = self._pointwise(node, args, kwargs)
                if result is not None:
                    return self._settle(node, result)
            elif is_reduction(node.target):
                return self._reduction(node, args, kwargs)
            elif combines_at_indices(node):
                result = lower_scatter(self.builder, self.plan, node, args, kwargs)
                if result is not None:
                    return self._settle(node, result)
            elif node.target is aten.cat.default:
                return self.concatenations.lower(node, args)
            elif node.target in POOLING:
                readers = [user for user in node.users if user.target is operator.getitem]
                used = [user.args[1] for user in readers if user in self.plan.alive]
                return lower_pooling(self.builder, node, args, used, self.plan.places.get(node))
        return lower_call(self.builder, self.plan, node, args, kwargs)

    def _constant(self, node: torch.fx.Node) -> LazyTensor:
        tensor: Any = operator.attrgetter(str(node.target))(self.compute.module)
        if not isinstance(tensor, torch.Tensor):
            raise Unsupported("non-tensor-constant", f"{node.target} is no tensor: {tensor!r}")
        tensor = tensor.detach()
        if tensor.numel() == 1 and tensor.device.type == "cpu" and is_loop_dtype(tensor.dtype):
            value = tensor.item()
            return pointwise(
                tensor, node.name, lambda emitter, _: emitter.constant(value, tensor.dtype), Cost()
            )
        view = self.builder.add_constant(node.name, tensor)
        return self.builder.in_memory(view, view.stride, node.name)

    def _view(self, node: torch.fx.Node, args: Any, kwargs: Any) -> LazyTensor:
        if node.target is aten.as_strided.default:
            # Its strides speak of eager's memory: of all that its argument is a view of.
            self.builder.realise(args[0].root)
            self.builder.realise(args[0])
        return self._settle(node, self._viewed(node, args, kwargs), view=True)

    def _viewed(self, node: torch.fx.Node, args: Any, kwargs: Any) -> LazyTensor:
        base, target = args[0], node.target
        assert isinstance(target, torch._ops.OpOverload)
        fake = node.meta["val"]
        operation: Callable[..., torch.Tensor] = target
        settings = args[1:]
        if target is aten.as_strided.default:
            operation = _striding_from(node.all_input_nodes[0].meta["val"].storage_offset())
        elif target in (aten.view.default, aten._unsafe_view.default):
            operation, settings = aten.view.default, (tuple(fake.shape),)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return operation(tensor, *settings, **kwargs)

        reindex = reindex_of(target, base.shape, fake, view)
        return view_of(base, fake, node.name, reindex, view)

    def _split(self, node: torch.fx.Node, args: Any, kwargs: Any) -> list[LazyTensor]:
        base, target = args[0], node.target
        assert isinstance(target, torch._ops.OpOverload)
        parts = []
        for position, fake in enumerate(node.meta["val"]):

            def part(tensor: torch.Tensor, position: int = position) -> torch.Tensor:
                return target(tensor, *args[1:], **kwargs)[position]

            parts.append(view_of(base, fake, node.name, strided_reindex(base.shape, part), part))
        return parts

    def _pointwise(self, node: torch.fx.Node, args: Any, kwargs: Any) -> LazyTensor | None:
        fake = node.meta["val"]
        found = scalar_rule(node.target, args, kwargs)
        if found is None:
            return None
        rule, operands = found
        if not all(isinstance(operand, (LazyTensor, int, float, bool)) for operand in operands):
            return None
        values = operands[1:] if rule.conditional else operands
        promoted = operand_dtype(rule, values, fake.dtype)
        dtype = compute_dtype(promoted)
        rounds = (
            node.target in CONVERSIONS
        )  # what the user rounded stays rounded; intermediate results are not

        def emit(emitter: Emitter, index: Index) -> int:
            emitted = []
            for position, operand in enumerate(operands):
                wanted = torch.bool if rule.conditional and position == 0 else dtype
                if isinstance(operand, LazyTensor):
                    value = emitter.broadcast(operand, index)
                    if rule.kind == OPERANDS:
                        # equality with an extremum that went through memory must see the same rounding
                        value = emitter.round_to(emitter.round_to(value, operand.dtype), promoted)
                    elif operand.shape and operand.dtype in _LONG_INTEGERS:
                        value = emitter.round_to(value, promoted)
                    emitted.append(emitter.cast(value, wanted))
                else:
                    value = emitter.constant(operand, wanted)
                    emitted.append(emitter.round_to(value, promoted) if rule.rounds_numbers else value)
            value = rule.compute(emitter, emitted, dtype)
            return emitter.round_to(value, fake.dtype) if rounds else value

        costs = [operand.current_cost() for operand in operands if isinstance(operand, LazyTensor)]
        cost = Cost(
            frozenset().union(*(cost.reads for cost in costs)),
            rule.cost + sum(cost.operations for cost in costs),
            rule.transcendental + sum(cost.transcendental for cost in costs),
        )
        return pointwise(fake, node.name, emit, cost)

    def _here(self, source: torch.fx.Node, reader: torch.fx.Node) -> Any:
        """The value of a node for one that reads its elements: one kernel reads no memory of two devices."""
        value = self.values.get(source)
        device = tree_leaves(reader.meta["val"])[0].device
        if not isinstance(value, LazyTensor) or value.device == device:
            return value
        if (source, device) not in self.elsewhere:
            again = self._again(source)
            self.elsewhere[source, device] = (
                self._copied(value, device, reader.name) if again is None else replace(again, device=device)
            )
        return self.elsewhere[source, device]

    def _again(self, node: torch.fx.Node) -> LazyTensor | None:
        """The value of a node computed anew, if that takes nothing of memory: it is given none, whoever reads it."""
        value = self.values.get(node)
        if not isinstance(value, LazyTensor) or node.op == "placeholder":
            return None
        if node.op == "get_attr":
            return None if value.body is None else replace(value)
        is_view = node.target in VIEWS and node.target is not aten.as_strided.default
        if not is_view and self.plan.use_kind(node) != INLINE:
            return None
        sources = {source: self._again(source) for source in node.all_input_nodes}
        if None in sources.values():
            return None
        args, kwargs = map_arg((node.args, node.kwargs), sources.get)  # type: ignore[misc]
        if is_view:
            return self._viewed(node, args, kwargs)
        if is_pointwise(node.target):
            return self._pointwise(node, args, kwargs)
        return INDEX_RULES[node.target](args, kwargs, node.meta["val"], node.name)  # type: ignore[index]

    def _copied(self, value: LazyTensor, device: torch.device, origin: str) -> LazyTensor:
        spec = TensorSpec.contiguous(value.shape, value.dtype, device)
        view = self.builder.new_buffer(f"{origin}_operand", spec)
        how = {"device": device, "memory_format": torch.contiguous_format}
        self.builder.call(aten._to_copy.default, (value,), how, (view.buffer,), {}, origin)
        return self.builder.in_memory(view, view.stride, origin)

    def _settle(self, node: torch.fx.Node, tensor: LazyTensor, view: bool = False) -> LazyTensor:
        """Gives a lazy tensor memory now, if the plan or its cost says so."""
        if tensor.located() is not None:
            return tensor
        place = self.plan.places.get(node)
        if place is not None:
            # The destination may have been carried back to the view's base, which then lies there already.
            if not (view and tensor.base is not None and tensor.base.located() is not None):
                self.builder.realise_at(tensor, place)
        elif node in self.plan.in_memory or (not view and self._worth_memory(node, tensor)):
            self.builder.realise(tensor)
        return tensor

    def _worth_memory(self, node: torch.fx.Node, tensor: LazyTensor) -> bool:
        """Whether writing a tensor once beats computing it in every nest that reads it."""
        cost = tensor.current_cost()
        if cost.operations > _MOST_OPERATIONS:
            return True
        if not cost.reads:
            return False
        if cost.transcendental and self.plan.widest_user.get(node, 0) >= 4 * tensor.numel:
            return True  # a root or logarithm per row, say, which every element of the row would repeat
        user = self.plan.only_user(node)
        if user is not None and self.plan.use_kind(user) == INLINE:
            return False  # left to the user, whose cost includes this one's
        if len(self.plan.readers.get(node, ())) < 2 or tensor.numel == 1 or self._is_a_burden(tensor, cost):
            return False
        if cost.transcendental or cost.operations > _CHEAP_OPERATIONS:
            return True
        return sum(count for _, count in cost.reads) >= 2 * tensor.numel

    def _is_a_burden(self, tensor: LazyTensor, cost: Cost) -> bool:
        """Whether a tensor of a GPU takes more memory than all that it is computed from, and much.

        To read that and compute a function or two again is faster there; capped logits in float32 are where a step's
        peak is.
        """
        held = tensor.numel * tensor.dtype.itemsize
        read = sum(count * self.builder.buffer_dtype(name).itemsize for name, count in cost.reads)
        return (
            tensor.device.type == "cuda"
            and held >= _LARGE_BYTES
            and read < held
            and cost.transcendental <= _FEW_FUNCTIONS
        )

    def _reduction(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        target, tensor, fake = node.target, args[0], node.meta["val"]
        assert isinstance(target, torch._ops.OpOverload)
        pair = has_positions(target)
        parts = parts_along_last_dim(node.all_input_nodes[0], self.values)
        if parts is not None and not pair:
            (reduction,) = reductions_of(target, tensor, args, kwargs, fake)
            if len(tensor.shape) - 1 not in reduction.dims and not reduction.flat and tensor.numel:
                return reduce_parts(self.builder, node, parts, reduction, self.plan.places.get(node))
        fakes = list(fake) if pair else [fake]
        names = [node.name, f"{node.name}_positions"]
        place = self.plan.places.get(node)
        results = []
        for reduction, result, name in zip(
            reductions_of(target, tensor, args, kwargs, fakes[0]), fakes, names, strict=False
        ):
            lowered = lower_reduction(self.builder, tensor, reduction, result, name, place)
            if place is not None and lowered.located() is None:
                self.builder.realise_at(lowered, place)
            results.append(lowered)
        return results if pair else results[0]


def _striding_from(beginning: int) -> Callable[..., torch.Tensor]:
    """``as_strided`` of a tensor that eager has at an offset of ``beginning`` elements into its storage."""

    def stride(
        tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> torch.Tensor:
        shift = 0 if storage_offset is None else storage_offset - beginning
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + shift)

    return stride


def _same_place(view: View | None, wanted: View) -> bool:
    if view is None or (view.buffer, view.shape) != (wanted.buffer, wanted.shape):
        return False
    return 0 in view.shape or (view.offset == wanted.offset and view.has_strides(wanted.stride))
