"""What each node of an exported graph costs: seconds, bytes or parameters, for cutting it into equal parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation
from gradsplit.distributed.pipeline.example_inputs import example_inputs
from gradsplit.distributed.pipeline.graph_facts import GraphFacts, fakes_of

# Of a device that nobody can measure, since the parameters have no data: only their ratio matters.
_FLOPS_PER_S = 1e11
_BYTES_PER_S = 1e10
_BACKWARD_FACTOR = 3.0
_REPEATS = 3


def seconds_of_nodes(exported: Exported, facts: GraphFacts, call: Sequence[torch.Tensor]) -> list[float]:
    """Of one microbatch's forward and backward of each node, measured with torch's kernels; where parameters have no
    data, estimated from operations and bytes.

    Args:
        call: of one microbatch; see ``example_call``.
    """
    if any(tensor.is_meta for tensor in exported.tensors.values()):
        return _estimated(exported, facts)
    measuring = _Measuring(exported.graph, facts, exported.device)
    with torch.enable_grad():
        measuring.run(*example_inputs(exported, call))
    return [measuring.seconds[node] for node in facts.nodes]


class _Measuring(fx.Interpreter):
    """Times each node, forward and backward, on values that were computed once."""

    def __init__(self, graph: fx.Graph, facts: GraphFacts, device: str) -> None:
        super().__init__(fx.GraphModule({}, graph))
        self.facts, self.device = facts, device
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        grad_enabled = torch.is_grad_enabled()
        best = float("inf")
        result: Any = None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        writes = n in self.facts.writes
        for _ in range(1 if writes else _REPEATS):
            # As inputs from elsewhere, of which autograd lets none be changed in place.
            given = tree_map_only(torch.Tensor, torch.Tensor.detach if writes else _fresh, (args, kwargs))
            start = _now(self.device)
            result = getattr(self, n.op)(n.target, *given)
            elapsed = _now(self.device) - start
            roots = [
                leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            roots = [leaf for leaf in roots if leaf.grad_fn is not None]
            leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            leaves = [leaf for leaf in leaves if leaf.requires_grad]
            if roots and leaves and grad_enabled:
                seeds = [torch.ones_like(root) for root in roots]
                start = _now(self.device)
                torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
                elapsed += _now(self.device) - start
            best = min(best, elapsed * (_BACKWARD_FACTOR if writes else 1))
        self.seconds[n] = best
        needs_grad = self.facts.requires_grad(n)
        return tree_map_only(
            torch.Tensor, lambda made: made.detach().requires_grad_(made.requires_grad or needs_grad), result
        )


def _now(device: str) -> float:
    """Seconds of the device's work so far; on a CPU of this thread alone, whatever else the machine does."""
    if device == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_().view_as(tensor) if tensor.requires_grad else tensor


def _estimated(exported: Exported, facts: GraphFacts) -> list[float]:
    seconds: dict[fx.Node, float] = {}

    class Counting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = super().run_node(n)
            moved = facts.bytes_of(n) if n.op not in ("output",) else 0
            flops = value_at_compilation(counter.get_total_flops())
            seconds[n] = _BACKWARD_FACTOR * (flops / _FLOPS_PER_S + moved / _BYTES_PER_S)
            return result

    symbols, inputs = fakes_of(exported)
    with run_on_fakes(symbols.mode), torch.enable_grad():
        Counting(fx.GraphModule({}, exported.graph)).run(*inputs)
    return [seconds[node] for node in facts.nodes]


def _at_first_read(facts: GraphFacts, exported: Exported, size: Callable[[Any], float]) -> list[float]:
    """The size of each tensor of the program at the node that reads it first."""
    seen: set[str] = set()
    found = []
    for node in facts.nodes:
        paths = {
            source.meta["path"]
            for source in node.all_input_nodes
            if source.meta.get("kind") in ("parameter", "buffer")
        }
        found.append(sum(size(exported.tensors[path]) for path in paths - seen))
        seen |= paths
    return found


def parameters_of_nodes(exported: Exported, facts: GraphFacts) -> list[float]:
    """How many elements of parameters each node is the first to read."""
    return _at_first_read(
        facts,
        exported,
        lambda tensor: float(tensor.numel()) if isinstance(tensor, torch.nn.Parameter) else 0.0,
    )


def bytes_of_nodes(exported: Exported, facts: GraphFacts, microbatches: int) -> list[float]:
    """Bytes of memory: parameters and their gradients, and what is computed for each microbatch in flight."""
    held = _at_first_read(
        facts,
        exported,
        lambda tensor: float(tensor.nbytes * (2 if isinstance(tensor, torch.nn.Parameter) else 1)),
    )
    kept = [0 if node in facts.constant else facts.bytes_of(node) for node in facts.nodes]
    return [state + microbatches * made for state, made in zip(held, kept, strict=True)]


def bytes_across_cuts(facts: GraphFacts) -> list[float]:
    """By position, the bytes of the values that a cut there sends on."""
    return across_cuts(facts, facts.bytes_of)


def across_cuts(facts: GraphFacts, size: Callable[[fx.Node], float]) -> list[float]:
    """By position, the sum over the values that a cut there sends on."""
    changes = [0.0] * (len(facts.nodes) + 1)
    place = {node: position for position, node in enumerate(facts.nodes)}
    for node in facts.nodes:
        users = [place[user] for user in node.users if user in place and user not in facts.constant]
        if node not in facts.constant and users:
            changes[place[node] + 1] += size(node)
            if max(users) + 1 < len(changes):
                changes[max(users) + 1] -= size(node)
    return _running_sums(changes)


def _running_sums(changes: Sequence[float]) -> list[float]:
    total, found = 0.0, []
    for change in changes:
        total += change
        found.append(total)
    return found
