"""A program that fails takes back the random numbers that it drew: see ``torch_facts.random_state``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.random_state import draws_returned_on_error


def returning_draws(program: Program, module: GraphModule) -> Program:
    """The program of a graph, with the CPU's generator as it was where it raises; itself if it draws nothing."""
    if not any(is_random(node) and _is_on_cpu(node.meta["val"]) for node in module.graph.nodes):
        return program

    def run(arguments: list[torch.Tensor]) -> Sequence[Any]:
        with draws_returned_on_error():
            return program(arguments)

    return run


def _is_on_cpu(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(value))
