"""Batch norms that do not train, behind convolutions and linear layers: folded into the weights (``freezing``).

A batch norm with statistics that are given multiplies each channel with one number and adds another, which the layer
before it may as well do: ``weight * scale`` and ``(bias - mean) * scale + shift``, with ``scale = gamma / sqrt(variance
+ eps)``. Both are expressions of parameters and buffers alone, which ``rewrites.fold_parameters`` then takes out of the
calls. They are computed in float32 at least, from the weights as the program holds them, before any cast of autocast's.

Left alone are batch norms in training, layers whose result something else reads too, parameters that the program
computes or changes, and float16, in which a weight of a channel with next to no variance may become infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.captured_graphs.calls import call_arguments
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.autograd.captured_graphs.static_tensors import is_unchanged
from gradsplit.compile_core.ir.tensor_spec import compute_dtype


class _Layer(NamedTuple):
    """Where a layer's weight has its output channels, and its arguments by name, up to the groups."""

    channels: int
    parameters: tuple[str, ...]


_CONVOLUTION = _Layer(0, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
_TRANSPOSED = _Layer(
    1, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
)
_LAYERS: Mapping[Any, _Layer] = {
    F.linear: _Layer(0, ("input", "weight", "bias")),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _CONVOLUTION),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
_NORM = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip
_FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def fold_batch_norms(module: GraphModule, held: Set[int]) -> GraphModule:
    """The captured graph without such batch norms; ``module`` itself stays as it is.

    Args:
        held: positions of the inputs that stay as they are between calls.
    """
    inputs = [node for k, node in enumerate(module.graph.find_nodes(op="placeholder")) if k in held]
    constants = {node for node in inputs if is_unchanged(node.meta["example_value"])}
    found = [node for node in module.graph.nodes if _is_foldable(node, constants)]
    if not found:
        return module
    folded = copy_module(module)
    copies = dict(zip(module.graph.nodes, folded.graph.nodes, strict=True))
    for node in found:
        _fold(copies[node])
    folded.recompile()
    return folded


def folded_weight(
    weight: Tensor, variance: Tensor, gamma: Tensor | None, eps: float, channels: int
) -> Tensor:
    """The weight of a layer that does what the batch norm behind it does, too; ``channels`` is the dim of these."""
    shape = [-1 if dim == channels else 1 for dim in range(weight.dim())]
    wide = weight.to(compute_dtype(weight.dtype))
    return (wide * _scale(variance, gamma, eps).reshape(shape)).to(weight.dtype)


def folded_bias(
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """The bias of such a layer, in the dtype of its weight."""
    centre = -mean if bias is None else bias.to(compute_dtype(bias.dtype)) - mean
    shifted = centre * _scale(variance, gamma, eps)
    return (shifted if beta is None else shifted + beta).to(dtype)


def _scale(variance: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    rstd = torch.rsqrt(variance.to(compute_dtype(variance.dtype)) + eps)
    return rstd if gamma is None else rstd * gamma


def _is_foldable(node: Node, constants: Set[Node]) -> bool:
    if node.target is not F.batch_norm:
        return False
    norm = call_arguments(node, _NORM)
    layer = norm["input"]
    if norm.get("training", False) is not False or not isinstance(layer, Node):
        return False
    if layer.target not in _LAYERS or len(layer.users) != 1:
        return False
    rule, given = _LAYERS[layer.target], call_arguments(layer, _LAYERS[layer.target].parameters)
    if rule is _TRANSPOSED and given.get("groups", 1) != 1:
        return False
    statistics = norm.get("running_mean"), norm.get("running_var")
    read = [*statistics, given["weight"], given.get("bias"), norm.get("weight"), norm.get("bias")]
    if None in read[:3] or not all(value is None or value in constants for value in read):
        return False
    if any(_trains(user) for statistic in statistics for user in statistic.users):  # type: ignore[union-attr]
        return False
    before, after = layer.meta["example_value"], node.meta["example_value"]
    weight = given["weight"].meta["example_value"]
    return (
        before.dtype == after.dtype
        and {before.dtype, weight.dtype} <= set(_FLOATS)
        and before.dim() == weight.dim()
    )


def _trains(user: Node) -> bool:
    """Whether it may change the statistics that it reads, which counts as no change."""
    return user.target is not F.batch_norm or call_arguments(user, _NORM).get("training", False) is not False


def _fold(node: Node) -> None:
    norm, layer = call_arguments(node, _NORM), node.args[0]
    assert isinstance(layer, Node)
    rule = _LAYERS[layer.target]
    given = call_arguments(layer, rule.parameters)
    variance, gamma, eps = norm["running_var"], norm.get("weight"), norm.get("eps", 1e-5)
    weight, dtype = given["weight"], given["weight"].meta["example_value"].dtype
    with node.graph.inserting_before(layer):
        scaled = node.graph.call_function(folded_weight, (weight, variance, gamma, eps, rule.channels))
        bias = node.graph.call_function(
            folded_bias,
            (given.get("bias"), norm["running_mean"], variance, gamma, norm.get("bias"), eps, dtype),
        )
    scaled.meta["example_value"] = weight.meta["example_value"]
    bias.meta["example_value"] = variance.meta["example_value"].to(dtype)
    layer.args, layer.kwargs = (), {**given, "weight": scaled, "bias": bias}
    layer.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(layer)
    node.graph.erase_node(node)
