"""An operator of joint graphs that says: this gradient counts as arrived as soon as any of these has.

Torch's engine runs a node of autograd's graph as soon as a gradient has arrived at one of its results. What the node
computes then is as defined as that gradient, though the values may not depend on it: zeros for the gradients of a
custom function that have not arrived, which times infinity are NaN, or the zeros that are the derivative of a sign.
Edges keep that in the graph, whatever else is done to it.

Zeros without memory (``is_nothing``) stay zeros whatever they are multiplied with, as if nothing had arrived: only
whether there is a gradient in the end depends on what did.

The engine also comes to results with nothing, where what follows them returned ``None``. Nodes of torch pass that on,
custom functions get zeros there, too (``with_none``): ``others`` are gradients of results then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph

_library = torch.library.Library("gradsplit", "FRAGMENT")
_library.define(
    "joint_arrival(Tensor gradient, Tensor[] others, bool is_nothing=False, bool with_none=False) -> Tensor"
)


def _run(
    gradient: Tensor, others: Sequence[Tensor], is_nothing: bool = False, with_none: bool = False
) -> Tensor:
    return torch.ops.aten.alias.default(gradient)


def _shape(
    gradient: Tensor, others: Sequence[Tensor], is_nothing: bool = False, with_none: bool = False
) -> Tensor:
    # The very strides: the node is left out in the end.
    return torch.empty_strided(
        gradient.size(), gradient.stride(), dtype=gradient.dtype, device=gradient.device
    )


_library.impl("joint_arrival", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gradsplit::joint_arrival", _shape, lib=_library)

JOINT_ARRIVAL = torch.ops.gradsplit.joint_arrival.default


def drop_joint_arrivals(graph: Graph) -> None:
    """Leaves them out of the graph once nobody asks any more which gradients a value depends on."""
    for node in graph.find_nodes(op="call_function", target=JOINT_ARRIVAL):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
