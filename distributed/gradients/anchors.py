"""What autograd's graph has in the place of parameters whose gradients compiled programs store.

To autograd a program does not have these inputs, but one leaf, its anchor, which never gets a gradient. The engine
reaches it in backwards that accumulate gradients in leaves at all; one that is asked for certain leaves reaches it only
if it is asked for the anchor, too (``requested_gradients``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradsplit.compile_core.torch_facts.autograd_engine import will_engine_execute_node
from gradsplit.distributed.gradients.accumulation_nodes import AccumulationNodes


class Anchors:
    """Those of all programs that store gradients of some parameters.

    Args:
        parameters: by name.
        nodes: where the engine would accumulate their gradients.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], nodes: AccumulationNodes) -> None:
        self._parameters = parameters
        self._nodes = nodes
        self._device = next(iter(parameters.values())).device
        # By what a program stores, with the node.
        self._anchors: dict[frozenset[str], tuple[torch.Tensor, Any]] = {}

    def of_program(self, names: Sequence[str]) -> torch.Tensor:
        """That of programs that store the gradients of just these parameters."""
        stored = frozenset(names)
        if stored not in self._anchors:
            anchor = torch.empty(0, device=self._device, requires_grad=True)
            self._anchors[stored] = anchor, get_gradient_edge(anchor).node
        return self._anchors[stored][0]

    def of_parameters(self, wanted: Collection[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of the programs that store gradients of any of these parameters."""
        names = {name for name, parameter in self._parameters.items() if parameter in wanted}
        return [anchor for stored, (anchor, _) in self._anchors.items() if not stored.isdisjoint(names)]

    def parameter_of(self, target: torch.Tensor | GradientEdge) -> torch.nn.Parameter | None:
        """The parameter, if it is one of these, that the engine is asked for."""
        for name, parameter in self._parameters.items():
            if target is parameter:
                return parameter
            if isinstance(target, GradientEdge) and target.node is self._nodes.by_name[name]:
                return parameter
        return None

    def are_reached(self) -> bool:
        """Whether the backward that runs comes to any of the programs' anchors."""
        return any(will_engine_execute_node(node) for _, node in self._anchors.values())
