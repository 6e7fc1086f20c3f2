"""Attention with changed scores, in a joint trace: one kept call forward and one backward where kernels may run them.

The program's function of scores is traced by itself, forward and backward, over all scores at once. Nothing is computed
of so large a matrix: kernels make the elements that they need. Elsewhere, as on a CPU or where a tensor that the
function reads has a gradient, the trace goes through the plain operators of ``dense_attention``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from gradsplit.compile_core.autograd.captured_graphs.calling_convention import dense_spec
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.autograd.control_flow import TraceBody, with_separate_results
from gradsplit.compile_core.autograd.tracing.kept_calls import KeptCalls
from gradsplit.compile_core.autograd.tracing.record_operators import outside_of_recording
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.attention_calls import AttentionCall
from gradsplit.compile_core.ir.flex_attention import (
    AttentionOptions,
    AttentionTensors,
    flex_attention,
    laid_out_like,
    score_dtype,
)
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.autograd_engine import are_transforms_active
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.torch_switches import without_autocast

logger = logging.getLogger(__name__)

# Where there are kernels for the calls.
DEVICE_TYPES = frozenset({"cuda"})


class FlexAttention:
    """The calls of a program, for one trace of it.

    Args:
        calls: the kept calls of the trace.
        fake_mode: that of the trace.
        trace_body: the joint graph of a body for fake tensors.
    """

    def __init__(self, calls: KeptCalls, fake_mode: FakeTensorMode, trace_body: TraceBody) -> None:
        self._calls = calls
        self._fake_mode = fake_mode
        self._trace_body = trace_body

    def replacements(self) -> Mapping[Any, Callable[..., Any]]:
        """What is run in the place of calls of the captured graph."""
        return {flex_attention: self._attend}

    def _attend(
        self,
        score_body: GraphModule,
        mask_body: GraphModule,
        options: AttentionOptions,
        *tensors: torch.Tensor,
    ) -> Sequence[torch.Tensor]:
        given = AttentionTensors.of(options, tensors)
        if isinstance(tensors[0], FakeTensor) or given.query.device.type not in DEVICE_TYPES:
            return flex_attention(score_body, mask_body, options, *tensors)
        try:
            _check(given)
            with without_autocast():
                calls = self._trace(score_body, mask_body, options, given)
        except Unsupported as reason:
            logger.info("flex_attention has all scores in memory: %s", reason.explanation)
            return flex_attention(score_body, mask_body, options, *tensors)
        key, value = given.key, given.value
        if key.size(0) != given.query.size(0):
            key, value = (tensor.expand(given.query.size(0), -1, -1, -1) for tensor in (key, value))
        rest = (*given.lists, *given.score_reads, *given.mask_reads)
        if calls.backward is None:
            return self._calls.call(calls.forward, (given.query, key, value, *rest))
        return _Attend.apply(self._calls, calls, given.query, key, value, *rest)  # type: ignore[return-value]

    def _trace(
        self,
        score_body: GraphModule,
        mask_body: GraphModule,
        options: AttentionOptions,
        given: AttentionTensors,
    ) -> _Calls:
        query = given.query
        shape = (*query.shape[:3], given.key.shape[2])
        dtype = score_dtype(query)
        operands = (query, given.key, given.value)
        tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
        specs = [
            [TensorSpec.of(tensor) for tensor in reads] for reads in (given.score_reads, given.mask_reads)
        ]
        query_spec = TensorSpec.of(query)
        with outside_of_recording():
            with self._fake_mode:
                scores = torch.empty(shape, dtype=dtype, device=query.device).requires_grad_(tracked)
                score_reads, mask_reads = ([spec.empty() for spec in part] for part in specs)
                like = query_spec.empty()
                result = laid_out_like(like.new_empty(*shape[:3], given.value.shape[3]), like)
            changed = self._body(score_body, [scores, *score_reads])
            mask = self._body(mask_body, mask_reads)
            rows = TensorSpec.contiguous(tuple(shape[:3]), dtype, query.device)
            results = (TensorSpec.of(result), rows, rows)
            mask_module = _with_outputs(mask, [0], 0)
            forward_module = _with_outputs(changed, [0], 0)
        forward = AttentionCall("forward", options, forward_module, mask_module, results)
        if not tracked:
            return _Calls(forward, None)
        _require(changed.gradient is not None, "the scores have no gradient")
        both = _with_outputs(changed, [0, changed.joint.num_outputs], 1)
        size = query.size(0)
        gradients = [
            dense_spec(TensorSpec.of(tensor.expand(size, -1, -1, -1).detach())) for tensor in operands
        ]
        return _Calls(forward, AttentionCall("backward", options, both, mask_module, gradients))

    def _body(self, body: GraphModule, examples: Sequence[torch.Tensor]) -> _TracedBody:
        with self._fake_mode:
            apart = with_separate_results(body, examples)
        joint = self._trace_body(apart, examples)
        draws = any(is_random(node) for node in joint.module.graph.nodes)
        _require(not joint.signature.mutated and not draws, "a function of scores does more than compute")
        return _TracedBody(joint)


@dataclass(frozen=True)
class _Calls:
    """``backward`` where gradients are asked for."""

    forward: AttentionCall
    backward: AttentionCall | None


@dataclass(frozen=True)
class _TracedBody:
    joint: JointGraph

    @property
    def result(self) -> int:
        (position,) = self.joint.signature.results
        assert isinstance(position, int)
        return position

    @property
    def gradient(self) -> Any:
        """The node of the scores' gradient, if the result depends on them."""
        outputs: Any = self.joint.module.graph.output_node().args[0]
        position = self.joint.num_outputs
        return outputs[position] if len(outputs) > position else None


def _check(given: AttentionTensors) -> None:
    """Whether kernels may do it.

    Raises:
        Unsupported: they may not.
    """
    dtypes = {tensor.dtype for tensor in (given.query, given.key, given.value)}
    _require(len(dtypes) == 1, "query, key and value have several dtypes")
    _require(not are_transforms_active(), "a transform of torch.func is around it")
    is_open = any(isinstance(size, torch.SymInt) for tensor in given.flat for size in tensor.shape)
    _require(not is_open, "a size differs between calls")
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.score_reads)
    _require(not wanted, "a tensor that score_mod reads has a gradient")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise Unsupported("attention-call", reason)


def _with_outputs(body: _TracedBody, positions: Sequence[int], num_tangents: int) -> GraphModule:
    """The graph with these of its outputs, the body's result for 0, and the first tangents."""
    module = copy_module(body.joint.module)
    output = module.graph.output_node()
    found: Any = output.args[0]
    output.args = (tuple(found[position or body.result] for position in positions),)
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in body.joint.tangents[num_tangents:]:
            module.graph.erase_node(node)
    module.recompile()
    return module


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, calls: KeptCalls, parts: _Calls, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        result, sums, maxima = calls.call(parts.forward, tensors)
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.call = calls, parts.backward
        ctx.save_for_backward(*tensors, result, sums)
        ctx.mark_non_differentiable(maxima)
        return result, sums, maxima

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        query, key, value, *rest, result, sums = ctx.saved_tensors
        arriving, of_sums, _ = gradients
        if arriving is None:
            arriving = torch.zeros_like(result)
        delta = (arriving.to(sums.dtype) * result.to(sums.dtype)).sum(-1)
        if of_sums is not None:
            delta = delta - of_sums / math.log(2)
        found = ctx.calls.call(ctx.call, [query, key, value, arriving, sums, delta, *rest])
        needed = ctx.needs_input_grad[2:]
        of_operands = (gradient if need else None for gradient, need in zip(found, needed, strict=False))
        return None, None, *of_operands, *(None for _ in rest)
