"""The operator of ``torch.nn.attention.flex_attention``: both functions become bodies of one node.

A function of one score is captured under ``vmap``, as torch's own operator calls it, so that its body is over all
scores at once. Positions are 32-bit integers, as the documentation has them. Sizes are those of the call: kernels know
no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from gradsplit.compile_core.capture.higher_order_calls.bodies import body_graph
from gradsplit.compile_core.capture.torch_rules.function_modes import indexing_by_tensors
from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import is_none
from gradsplit.compile_core.capture.values.tensors import TensorValue
from gradsplit.compile_core.ir.flex_attention import (
    BLOCK_LISTS,
    AttentionOptions,
    flex_attention,
    score_dtype,
)
from gradsplit.compile_core.torch_facts.higher_order_operators import vmap_over_scores

# Of the tuple that a block mask is to the operator: the lengths, then the lists; sizes of blocks and the function last.
_FIRST_LIST = 2
_NAMES = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers",
    "mask_mod_other_buffers",
)  # fmt: skip


def attend(state: CaptureState, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The node of a call of the operator."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    operands = [given[name] for name in _NAMES[:3]]
    if not all(isinstance(operand, TensorValue) for operand in operands):
        raise state.unsupported("flex-attention", "flex_attention of something else than tensors")
    block_mask = state.items_of(given["block_mask"])
    *lists, rows, columns, mask_mod = block_mask
    lists = lists[_FIRST_LIST : _FIRST_LIST + len(BLOCK_LISTS)]
    named = {name: value for name, value in zip(BLOCK_LISTS, lists, strict=True) if not is_none(value)}
    tensors = [*operands, *named.values()]
    for tensor in tensors:
        _settle_sizes(tensor.fake)  # type: ignore[attr-defined]
    query, key = operands[0].fake, operands[1].fake  # type: ignore[attr-defined]
    if query.dim() != 4 or key.dim() != 4 or query.size(0) not in (key.size(0), query.size(0) * key.size(0)):
        raise state.unsupported("flex-attention", "flex_attention of tensors that do not fit")
    shape = (*query.shape[:3], key.shape[2])
    others = [state.items_of(given[name]) if name in given else [] for name in _NAMES[-2:]]
    with_scores, score_reads = _capture(state, given["score_mod"], query, shape, others[0], takes_scores=True)
    with_mask, mask_reads = _capture(state, mask_mod, query, shape, others[1], takes_scores=False)
    if torch.is_grad_enabled() and any(node.meta["example_value"].requires_grad for node in mask_reads):
        raise state.unsupported("flex-attention", "a mask_mod that reads a tensor which requires gradients")
    sizes = (rows.as_constant(), columns.as_constant())
    options = AttentionOptions(given["scale"].as_constant(), sizes, tuple(named), len(score_reads))
    held = [
        state.graph.hold("score_mod", with_scores),
        state.graph.hold("mask_mod", with_mask),
        state.graph.hold("attention", options),
    ]
    nodes = [tensor.node for tensor in tensors]  # type: ignore[attr-defined]
    return state.call_tensor_nodes(flex_attention, [*held, *nodes, *score_reads, *mask_reads])


def _capture(
    state: CaptureState,
    function: Value,
    query: torch.Tensor,
    shape: Sequence[int],
    others: list[Value],
    takes_scores: bool,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The body of a function over all scores, and what it reads of the graph."""
    name = "score_mod" if takes_scores else "mask_mod"
    with body_graph(state) as graph, indexing_by_tensors(state):
        arguments: list[Value] = []
        with graph.fake_mode:
            fake = torch.empty(*shape, dtype=score_dtype(query), device=query.device)
        if takes_scores:
            node = graph.add_placeholder("scores", fake.requires_grad_(torch.is_grad_enabled()))
            scores = state.tensor_of_fake[id(fake)] = TensorValue(node, fake, torch.Tensor)
            arguments.append(scores)
        for size in shape:
            positions = state.call_torch(torch.arange, 0, int(size), device=query.device, dtype=torch.int32)
            arguments.append(positions)
        in_dims = (0,) if takes_scores else ()
        suffix = state.from_constant((None,) * len(others))
        over_scores = state.wrap(vmap_over_scores, None).call(
            state, [function, state.from_constant(in_dims), suffix], {}
        )
        result = over_scores.call(state, [*arguments, *others], {})
        if not isinstance(result, TensorValue):
            raise state.unsupported("flex-attention", f"a {name} that returns {result.describe()}")
        if not takes_scores and result.fake.dtype != torch.bool:
            raise state.unsupported("flex-attention", f"a {name} that returns {result.fake.dtype}")
        if fake._version:
            raise state.unsupported("flex-attention", f"a {name} that changes the score in place")
        for node in graph.lifted:
            _settle_sizes(node.meta["example_value"])
        return graph.close([result.node]), list(graph.lifted)


def _settle_sizes(fake: torch.Tensor) -> None:
    """Make open sizes and strides those of this call."""
    for number in (*fake.shape, *fake.stride()):
        int(number)
