"""A program that fails takes back the random numbers that it drew.

The call is then made again as plain Python, which draws them itself: the generator would move twice. Limit: what a
GPU's generator gave stays drawn; its kernels fail after the program has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.communicator import Program
from gradsplit.compile_core.torch_facts.dispatcher import is_random
from gradsplit.compile_core.torch_facts.torch_switches import saved_tensor_hooks_are_active


def returning_draws(program: Program, module: GraphModule) -> Program:
    """The program of a graph, with the CPU's generator as it was where it raises; the program itself if it draws none.

    Under hooks for saved tensors, where no call is made again, the draws stay.
    """
    if not any(is_random(node) and _is_on_cpu(node.meta["val"]) for node in module.graph.nodes):
        return program
    generator = torch.default_generator

    def run(arguments: list[torch.Tensor]) -> Sequence[Any]:
        state = generator.get_state()
        try:
            return program(arguments)
        except Exception:
            if not saved_tensor_hooks_are_active():
                generator.set_state(state)
            raise

    return run


def _is_on_cpu(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(value))
