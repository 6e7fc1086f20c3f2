"""Control flow that data decide, in a joint trace: both branches, or the step of a loop, in one kept call.

Each body is traced and partitioned as a graph of its own, under the modes that hold where the program calls it. What
runs in the end are torch's own kernels. The gradient of a ``torch.cond`` is a kept call too: it takes the tensors that
the branches read, and runs the chosen one again before its backward, as torch does.

Limits, each an ``Unsupported``: bodies that draw random numbers, which the second run would draw anew; bodies that
change a tensor in place; expanded results of open sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from gradsplit.compile_core.autograd.captured_graphs.calling_convention import dense_spec
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.tracing.kept_calls import DifferentiableCall, KeptCalls, takes_gradients
from gradsplit.compile_core.autograd.tracing.record_operators import outside_of_recording
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir import control_flow
from gradsplit.compile_core.ir.graphs import JointGraph, PartitionedGraph, resolve_spec
from gradsplit.compile_core.ir.kept_calls import KeptCall, in_layout
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.higher_order_operators import cond_operator, while_loop_operator

TraceBody = Callable[[GraphModule, Sequence[torch.Tensor]], JointGraph]


class ControlFlow:
    """The calls of a program that data decide, for one trace of it.

    Args:
        calls: the kept calls of the trace.
        fake_mode: that of the trace.
        trace_body: the joint graph of a body for fake tensors.
    """

    def __init__(self, calls: KeptCalls, fake_mode: FakeTensorMode, trace_body: TraceBody) -> None:
        self._calls = calls
        self._fake_mode = fake_mode
        self._trace_body = trace_body
        self._default_dtype = torch.get_default_dtype()

    def replacements(self) -> Mapping[Any, Callable[..., Any]]:
        """What is run in the place of calls of the captured graph."""
        return {
            control_flow.cond: self._cond,
            control_flow.while_loop: self._while_loop,
            cond_operator: lambda predicate, on_true, on_false, operands=(): self._cond(
                predicate, on_true, on_false, *operands
            ),
            while_loop_operator: lambda condition, step, carried, read: self._while_loop(
                condition, step, len(carried), *carried, *read
            ),
        }

    def _cond(
        self, predicate: torch.Tensor, on_true: GraphModule, on_false: GraphModule, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        if isinstance(predicate, FakeTensor):
            return control_flow.cond_example(predicate, on_true, on_false, *tensors)
        branches = [self._body(branch, tensors) for branch in (on_true, on_false)]
        if branches[0].results != branches[1].results:
            raise Unsupported("different-branches", "the branches of torch.cond have different metadata")

        def run(predicate: torch.Tensor, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            return branches[0 if predicate else 1](*tensors)

        def differentiate(predicate: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
            branch = branches[0 if predicate else 1]
            found = branch.gradients(rest[: len(tensors)], rest[len(tensors) :])
            return [found[k] if k in found else torch.zeros_like(rest[k]) for k in wanted]

        forward = KeptCall("cond", run, branches[0].results)
        if not any(branch.graph.backward for branch in branches):
            return self._calls.call(forward, [predicate, *tensors])
        wanted = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
        specs = [dense_spec(TensorSpec.of(tensors[position])) for position in wanted]
        kept = DifferentiableCall(forward, KeptCall("cond_backward", differentiate, specs))
        return self._calls.call_with_gradients(kept, [predicate.detach(), *tensors])

    def _while_loop(
        self, condition: GraphModule, step: GraphModule, num_carried: int, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        if isinstance(tensors[0], FakeTensor):
            return control_flow.while_loop_example(condition, step, num_carried, *tensors)
        constants = [tensor.detach() for tensor in tensors]
        holds, step_body = self._body(condition, constants), self._body(step, constants)

        def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            return control_flow.while_loop(holds, step_body, num_carried, *tensors)

        return self._calls.call(KeptCall("while_loop", run, step_body.results), tensors)

    def _body(self, body: GraphModule, tensors: Sequence[torch.Tensor]) -> _TracedBody:
        """Traces a body for tensors like those of the outer trace."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise Unsupported(
                "number-in-branch", "a branch or a loop reads a number that differs between calls"
            )
        if torch.get_default_dtype() is not self._default_dtype:
            raise Unsupported(
                "default-dtype", "a branch or a loop under a default dtype that the program sets"
            )
        like = [(TensorSpec.of(tensor), tensor.requires_grad) for tensor in tensors]
        with outside_of_recording():
            with self._fake_mode:
                examples = [spec.empty().requires_grad_(tracked) for spec, tracked in like]
                apart = with_separate_results(body, examples)
            joint = self._trace_body(apart, examples)
        if joint.signature.mutated:
            raise Unsupported("mutation-in-branch", "a branch or a loop's step changes a tensor in place")
        if any(is_random(node) for node in joint.module.graph.nodes):
            raise Unsupported("random-in-branch", "a branch or a loop's step draws random numbers")
        traced = _TracedBody(partition(joint))
        if any(spec.is_open and not spec.is_dense for spec in traced.results):
            raise Unsupported("symbolic-branch", "a branch or a loop makes an expanded tensor of open sizes")
        return traced


@dataclass(frozen=True)
class _TracedBody:
    """A traced body whose results are tensors of its own, called on real tensors without autograd."""

    graph: PartitionedGraph

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.graph.forward(*tensors)
        return tuple(outputs[position] for position in self._positions)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        nodes = [node for node in graph_results(self.graph.forward) if node is not None]
        return tuple(TensorSpec.of(nodes[position].meta["val"]) for position in self._positions)

    @property
    def _positions(self) -> list[int]:
        positions = [position for position in self.graph.signature.results if isinstance(position, int)]
        assert len(positions) == len(self.graph.signature.results)
        return positions

    def gradients(
        self, tensors: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        """By position of the tensor, where the body has any; ``arriving`` are those of its floating-point results."""
        graph, signature = self.graph, self.graph.signature
        if graph.backward is None:
            return {}
        outputs = graph.forward(*tensors)
        inputs = graph_inputs(graph.forward)
        saved = {node.name: tensor for node, tensor in zip(inputs, tensors, strict=True)}
        computed = [name for name in graph.saved if name not in saved]
        saved |= zip(computed, outputs[graph.num_outputs :], strict=True)
        sizes = outputs[graph.num_outputs - signature.open_sizes : graph.num_outputs]
        tangents = dict(
            zip(filter(lambda k: takes_gradients(outputs[k]), self._positions), arriving, strict=True)
        )
        specified = [
            in_layout(tangents[position], resolve_spec(spec, sizes))
            for position, spec in zip(signature.tangents, signature.tangent_specs, strict=True)
        ]
        found = graph.backward(*(saved[name] for name in graph.saved), *specified)
        pairs = zip(signature.gradient_inputs, found, strict=True)
        return {position: gradient for position, gradient in pairs if gradient is not None}


def with_separate_results(body: GraphModule, examples: Sequence[torch.Tensor]) -> GraphModule:
    """The body with copies for results in the memory of an input or of one another, as ``torch.cond`` gives them."""
    with torch.no_grad():
        results = body(*examples)
    shared = control_flow.positions_in_shared_memory(results, examples)
    if not shared:
        return body
    apart = copy_module(body)
    (output,) = apart.graph.find_nodes(op="output")
    nodes = list(output.args[0])
    with apart.graph.inserting_before(output):
        for position in shared:
            nodes[position] = apart.graph.call_function(torch.clone, (nodes[position],))
    output.args = (tuple(nodes),)
    apart.recompile()
    return apart
