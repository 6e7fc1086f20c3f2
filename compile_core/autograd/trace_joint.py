"""Traces a captured graph forward and backward into one functional ATen graph.

The idea is AOTAutograd's: run the captured program once on fake tensors with autograd on, ask autograd for
the gradients, and record every operator below autograd (``record_operators``).

Limits, each an ``Unsupported`` (the caller then runs the captured graph with torch's own kernels): an input that
shares memory with another one is changed in place; an input's metadata is changed; results that share memory
which none of them fills; sparse or quantised layouts.

One difference to eager remains: the gradient of an input that was changed under autograd, asked for as that of an
intermediate (``retain_grad``, a hook), holds what arrives from outside the graph, not from its later uses inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from gradsplit.compile_core.autograd.captured_graphs.calling_convention import (
    as_leaf,
    dense_spec,
    failures_explained,
    find_calling_convention,
)
from gradsplit.compile_core.autograd.captured_graphs.preserved_modes import preserved_modes
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import replace_calls
from gradsplit.compile_core.autograd.control_flow import ControlFlow
from gradsplit.compile_core.autograd.flex_attention import FlexAttention
from gradsplit.compile_core.autograd.operators.gradient_sources import (
    Sources,
    gradient_sources,
    tangent_groups,
)
from gradsplit.compile_core.autograd.operators.graph_nodes import marked_as_backward
from gradsplit.compile_core.autograd.rewrites.result_layouts import keep_layouts
from gradsplit.compile_core.autograd.rewrites.separate_results import separate_results
from gradsplit.compile_core.autograd.rewrites.simplify import simplify
from gradsplit.compile_core.autograd.tracing.arrivals import join_arrivals, noted_functions_with_none
from gradsplit.compile_core.autograd.tracing.below_wrappers import RecordedNodes, record_below_wrappers
from gradsplit.compile_core.autograd.tracing.captured_nodes import CapturedNodes
from gradsplit.compile_core.autograd.tracing.class_numbers import counted_classes
from gradsplit.compile_core.autograd.tracing.custom_operators import (
    drawing_by_state,
    functional_custom_operators,
)
from gradsplit.compile_core.autograd.tracing.data_symbols import DataSymbols, has_data_sizes
from gradsplit.compile_core.autograd.tracing.kept_backwards import keep_backwards
from gradsplit.compile_core.autograd.tracing.kept_calls import KeptCalls, kept_calls
from gradsplit.compile_core.autograd.tracing.number_recorder import NumberOperations, reads_numbers
from gradsplit.compile_core.autograd.tracing.open_sizes import OpenSizes
from gradsplit.compile_core.autograd.tracing.program_modes import (
    noted_default_dtypes,
    refuse_modes,
    settle_default_dtypes,
)
from gradsplit.compile_core.autograd.tracing.recompute_regions import (
    check_random_state,
    run_marked,
    run_tagged,
)
from gradsplit.compile_core.autograd.tracing.record_operators import Decompositions, OperatorRecorder, record
from gradsplit.compile_core.autograd.tracing.recurrent_layers import layered_networks
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir import higher_order
from gradsplit.compile_core.ir.graphs import GraphSignature, JointGraph, Mutation
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.ir.wrapper_edges import has_wrappers
from gradsplit.compile_core.torch_facts.autograd_engine import reaching_roots
from gradsplit.compile_core.torch_facts.dispatcher import has_data_mutation
from gradsplit.compile_core.torch_facts.fake_tensors import fake_mode_of, kernels_of_sizes
from gradsplit.compile_core.torch_facts.higher_order_operators import tag_activation_checkpoint
from gradsplit.compile_core.torch_facts.symbolic_numbers import forget_what_was_read
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast


def trace_joint(
    module: torch.fx.GraphModule, examples: Sequence[Any], decompositions: Decompositions
) -> JointGraph:
    """The joint graph of ``module`` at the shapes of ``examples``, in the grad mode of the caller.

    What the trace asks of sizes that are symbolic becomes a condition of their ShapeEnv, which the caller sees to.

    Args:
        module: a captured graph: one placeholder per tensor or number, a flat tuple of tensors out.
        examples: fake tensors, with the ``requires_grad`` of the real inputs; numbers: SymInts, or any float.
        decompositions: operator -> function that expresses it in simpler ones.

    Returns:
        A ``JointGraph`` whose nodes carry their fake result in ``meta["val"]``. Without gradients to compute
        it has no tangents and is an inference graph.

    Raises:
        Unsupported: one of the limits above.
    """
    refuse_modes(module)
    fake_mode, examples = _with_symbols(module, examples)
    with_wrappers = has_wrappers(module)
    if with_wrappers and (reads_numbers(module) or any(isinstance(example, float) for example in examples)):
        # DTensor compares an operator's arguments with those of earlier ones, in an order that differs from rank to
        # rank: what is asked of a symbol there would let one rank compile what another does not.
        raise Unsupported(
            "open-number-beside-wrappers", "a number that differs between calls, beside wrappers"
        )
    operations, symbols = NumberOperations(), DataSymbols()
    module = symbols.keep(operations.keep(module))
    with kept_calls() as calls:
        control_flow = ControlFlow(calls, fake_mode, lambda body, inputs: trace_joint(body, inputs, {}))
        attention = FlexAttention(
            calls, fake_mode, lambda body, inputs: trace_joint(body, inputs, decompositions)
        )
        replacements = {
            higher_order.checkpoint: run_marked, tag_activation_checkpoint: run_tagged,
            **control_flow.replacements(), **attention.replacements(), **noted_default_dtypes(),
            **functional_custom_operators(module, calls, fake_mode), **drawing_by_state(calls, fake_mode),
            **layered_networks(fake_mode), **counted_classes(),
        }  # fmt: skip
        traceable = replace_calls(module, replacements)
        return _trace(
            traceable, examples, fake_mode, decompositions, calls, operations, symbols, with_wrappers
        )


def _trace(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    fake_mode: FakeTensorMode,
    decompositions: Decompositions,
    calls: KeptCalls,
    operations: NumberOperations,
    symbols: DataSymbols,
    with_wrappers: bool,
) -> JointGraph:
    forget_what_was_read(fake_mode)
    convention = find_calling_convention(module, examples, fake_mode)
    num_results = len(convention.picks)
    # Results that take gradients, then inputs that got a history by being changed.
    tangents = tuple(k for k, differentiable in enumerate(convention.differentiable) if differentiable)
    rebound = convention.rebound
    trainable = bool(tangents or rebound) and bool(convention.gradient_inputs)
    mutated: list[int] = []
    left_undefined: dict[int, Sources] = {}
    forget_what_was_read(fake_mode)
    sizes = OpenSizes()
    captured = CapturedNodes()

    def differentiate(recorder: OperatorRecorder, *inputs: Any) -> tuple[list[Any], list[Any], Sequence[Any]]:
        """The inputs as the program leaves them, what it computes, and the gradients."""
        primals, seeds = inputs[: len(examples)], inputs[len(examples) :]
        # Autograd lets no leaf be changed; its clone is no copy in the end, the graph is functional.
        passed: list[Any] = [
            tensor.clone() if position in rebound else tensor for position, tensor in enumerate(primals)
        ]
        with noted_functions_with_none() as with_none:
            results = captured.run(module, *passed)
        recorder.write_checks()
        symbols.settle(fake_mode.shape_env)
        outputs = [pick.of(results) for pick in convention.picks]
        if not trainable:
            return passed, outputs, ()
        roots = [outputs[position] for position in tangents]
        roots += [passed[position] for position in rebound]
        wanted = [primals[position] for position in convention.gradient_inputs]
        reached = reaching_roots(roots)
        join_arrivals(reached, seeds, with_none, recorder)
        keep_backwards(reached, calls, fake_mode)
        with without_autocast(), marked_as_backward():
            gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        left_undefined.update(
            (k, reached[source.grad_fn])
            for k, (source, gradient) in enumerate(zip(wanted, gradients, strict=True))
            if gradient is None and source.grad_fn in reached
        )
        return passed, outputs, gradients

    def joint(recorder: OperatorRecorder, *inputs: Any) -> list[Any]:
        passed, outputs, gradients = program(recorder, *inputs)
        mutated.extend(
            position
            for position, given in enumerate(passed)
            if isinstance(given, torch.Tensor) and has_data_mutation(given)
        )
        updated = [passed[position] for position in mutated]
        sizes.collect(convention.results, specs)
        return [*outputs, *updated, *sizes.numbers, *gradients]

    program = differentiate
    with fake_mode:
        specs = [convention.specs[position] for position in tangents]
        specs += [TensorSpec.of(examples[position]) for position in rebound]
        specs = [dense_spec(spec) for spec in specs] if trainable else []
        seeds = [spec.empty() for spec in specs]
        leaves = [as_leaf(example) if isinstance(example, torch.Tensor) else example for example in examples]
    with (
        preserved_modes(),
        preserve_node_meta(),
        fake_mode,
        kernels_of_sizes(fake_mode),
        failures_explained(),
    ):
        if with_wrappers:
            if rebound:
                explanation = "an input with a history in autograd is changed in a program with wrappers"
                raise Unsupported("changed-beside-wrappers", explanation)
            below = record_below_wrappers(
                lambda *given: [*chain(*differentiate(*given)[1:])],
                leaves,
                seeds,
                fake_mode,
                operations,
                captured,
            )
            captured = RecordedNodes()
            program = captured.program(below, len(examples), len(convention.picks))
        traced = record(joint, leaves, seeds, decompositions, fake_mode, operations, captured)
    results, tangent_specs = sizes.of_results(convention.results), sizes.of_specs(specs)
    _check_overlap(examples, mutated)
    check_random_state(traced)
    calls.settle(traced)
    settle_default_dtypes(traced, fake_mode)

    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    num_outputs = num_results + len(mutated) + len(sizes.numbers)
    groups = tangent_groups(traced.graph, placeholders[len(examples) :])
    graph = separate_results(simplify(traced), num_outputs, set(placeholders[len(examples) :]))
    graph = keep_layouts(graph, convention.specs)
    output_of = {position: num_results + k for k, position in enumerate(mutated)}
    if not output_of.keys() >= set(rebound):
        explanation = (
            "the program gives an input another history in autograd and leaves its values as they are"
        )
        raise Unsupported("metadata-mutation", explanation)
    seeds_of = tuple(output_of[position] for position in rebound)
    signature = GraphSignature(
        results=results,
        mutated=tuple(
            Mutation(position, num_results + k, position in rebound, position in convention.counted)
            for k, position in enumerate(mutated)
        ),
        gradient_inputs=convention.gradient_inputs if trainable else (),
        tangents=(*tangents, *seeds_of) if trainable else (),
        tangent_specs=tangent_specs,
        gradient_tangents=_find_dependencies(
            graph, placeholders[len(examples) :], num_outputs, left_undefined
        ),
        tangent_groups=groups if trainable else (),
        open_sizes=len(sizes.numbers),
        left_undefined=tuple(left_undefined),
        spent=tuple(sorted(convention.spent)),
    )
    return JointGraph(
        module=graph,
        primals=tuple(placeholders[: len(examples)]),
        tangents=tuple(placeholders[len(examples) :]),
        num_outputs=num_outputs,
        signature=signature,
        unnoticed_inputs=convention.unnoticed_inputs,
        unnoticed_outputs=convention.unnoticed_picks,
    )


def _find_dependencies(
    module: torch.fx.GraphModule,
    tangents: Sequence[str],
    num_outputs: int,
    left_undefined: Mapping[int, Sources],
) -> tuple[Sources, ...]:
    """For each gradient, which tangents it depends on, as a bit set; for some that are undefined that is given."""
    sources = gradient_sources(module.graph, tangents)
    (output,) = module.graph.find_nodes(op="output")
    gradients = output.args[0][num_outputs:]
    return tuple(
        left_undefined.get(k, 0) if node is None else sources[node] for k, node in enumerate(gradients)
    )


def _with_symbols(module: torch.fx.GraphModule, examples: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """The mode to trace in, and the examples with symbols for floats."""
    mode = fake_mode_of(examples) or FakeTensorMode()
    takes_floats = any(isinstance(example, float) for example in examples)
    if not takes_floats and not reads_numbers(module) and not has_data_sizes(module):
        return mode, list(examples)
    if mode.shape_env is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
    assert mode.shape_env is not None
    mode.allow_scalar_outputs = True
    # Nothing may be asked of these symbols, so what is traced is right for every float.
    return mode, [
        mode.shape_env.create_unbacked_symfloat() if isinstance(example, float) else example
        for example in examples
    ]


def _check_overlap(examples: Sequence[Any], mutated: Sequence[int]) -> None:
    """The functional graph knows its inputs as separate tensors: a change of one does not reach another."""
    tensors = [example for example in examples if isinstance(example, torch.Tensor)]
    owners = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    for position in mutated:
        if owners[examples[position].untyped_storage()._cdata] > 1:
            raise Unsupported(
                "overlapping-inputs",
                f"input {position} is changed in place and shares its memory with another input",
            )
        if TensorSpec.of(examples[position]).may_overlap:
            raise Unsupported(
                "overlapping-elements", f"input {position}, whose elements share memory, is changed in place"
            )
