"""Attention without the masks that say nothing: these cost the fused kernels, or memory traffic.

A mask whose values are known when the program is compiled (``known_values``) is left out where nothing is masked, and
becomes a flag where just the later positions are masked. Other masks stay as they are, also those that the fused
kernels refuse since their last dim is expanded: they mask whole rows, for which cuDNN's kernel gives no zeros.

Torch lays out the result as the kernel does that it chooses, and the program may have relied on what it saw: the result
is copied where that becomes another layout.

An additive mask counts with 0 and minus infinity only: what a large negative number masks still gets the weight where
all other scores are as small. NaN and infinities at masked positions, which spoil a product with zero weights, do not
reach the result of a kernel that skips these positions; torch's own choice of a kernel makes the same difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention

from gradsplit.compile_core.autograd.captured_graphs.attention_calls import (
    attention_arguments,
    with_arguments,
)
from gradsplit.compile_core.autograd.captured_graphs.known_values import known_values
from gradsplit.compile_core.ir.higher_order import CHECKPOINTS
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.torch_facts.symbolic_numbers import repeated_dims


def simplify_masks(
    module: GraphModule, keep_random_numbers: bool, given: Mapping[Node, Tensor] = MappingProxyType({})
) -> GraphModule:
    """The captured graph with attention masked as simply as can be; ``module`` itself stays as it is.

    Args:
        keep_random_numbers: whether dropout must draw what it draws with the program's mask.
        given: known values of placeholders.
    """
    calls = [node for node in module.graph.nodes if node.target is scaled_dot_product_attention]
    masks = {
        node: mask for node in calls if isinstance(mask := attention_arguments(node).get("attn_mask"), Node)
    }
    checkpoints = [node for node in module.graph.nodes if node.target in CHECKPOINTS]
    passed = {source for node in checkpoints for source in node.all_input_nodes if source.op != "get_attr"}
    if not masks and not passed:
        return module
    known = known_values(module, passed.union(masks.values()), given)
    flags = {mask: _as_flag(known[mask]) for mask in set(masks.values()) if mask in known}
    changes = {node: _changes(node, flags.get(mask), keep_random_numbers) for node, mask in masks.items()}
    bodies = [_simplified_body(module, node, known, keep_random_numbers) for node in checkpoints]
    if len(dict(bodies)) < len(bodies):
        bodies = []  # What holds for one call of a body need not hold for another.
    if not any(changes.values()) and all(body is getattr(module, name) for name, body in bodies):
        return module
    simplified = with_arguments(module, {node: changed for node, changed in changes.items() if changed})
    for name, body in bodies:
        setattr(simplified, name, body)
    simplified.recompile()
    return simplified


def _changes(node: Node, is_causal: bool | None, keep_random_numbers: bool) -> dict[str, Any]:
    """The arguments of ``attention_laid_out`` that differ from those of a masked call; none where that stays.

    ``is_causal`` says the same as its mask, if anything does.
    """
    arguments = attention_arguments(node)
    nodes = [*(arguments[name] for name in ("query", "key", "attn_mask")), node]
    examples = [node.meta.get("example_value") for node in nodes]
    if is_causal is None or not all(
        isinstance(example, Tensor) and example.layout is torch.strided for example in examples
    ):
        return {}
    query, key, mask, result = map(TensorSpec.of, examples)
    if any(spec.is_open for spec in (query, key, mask, result)) or not result.is_dense:
        return {}
    drops = arguments.get("dropout_p", 0.0) != 0.0
    if arguments.get("is_causal", False) is not False or (drops and keep_random_numbers):
        return {}
    if not _fits(mask.shape, (*query.shape[:-1], key.shape[-2])):
        return {}
    return {"attn_mask": None, "is_causal": is_causal, "strides": result.stride}


def _fits(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether a mask makes no dim of the result larger."""
    try:
        return torch.broadcast_shapes(mask, scores) == scores
    except RuntimeError:
        return False


def _as_flag(mask: Tensor) -> bool | None:
    """The ``is_causal`` that says what a mask says; ``None`` where none does."""
    one = _unexpanded(mask)
    if bool((one if mask.dtype == torch.bool else one == 0).all()):
        return False
    size = mask.shape[-1]
    if one.shape[-2:] != (size, size):
        return None
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    causal = seen if mask.dtype == torch.bool else torch.where(seen, 0.0, -torch.inf).to(mask.dtype)
    return True if torch.equal(one, causal.expand_as(one)) else None


def _unexpanded(mask: Tensor) -> Tensor:
    for dim in repeated_dims(mask.shape, mask.stride()):
        mask = mask.narrow(dim, 0, 1)
    return mask


def _simplified_body(
    module: GraphModule, node: Node, known: Mapping[Node, Tensor], keep_random_numbers: bool
) -> tuple[str, GraphModule]:
    """The body of a checkpoint in ``module``, by its name."""
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    (name,) = [name for name in names if isinstance(getattr(module, name), GraphModule)]
    body: GraphModule = getattr(module, name)
    arguments = node.args[CHECKPOINTS[node.target] :]
    placeholders = body.graph.find_nodes(op="placeholder")
    given = {
        placeholder: known[source]
        for placeholder, source in zip(placeholders, arguments, strict=True)
        if isinstance(source, Node) and source in known
    }
    return name, simplify_masks(body, keep_random_numbers, given)
