"""What the nodes of an exported graph cost as parts of generated programs.

Node by node, torch's kernels launch and move much that generated kernels do not. So the graph is cut wherever few
values cross, each piece is compiled and timed, and the times of its nodes are scaled to that. Pieces that are alike, as
the layers of most models are, are timed once.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from gradsplit.compile_core.export.exported import Exported
from gradsplit.compile_core.export.structures import build
from gradsplit.compile_core.interface import api
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.distributed.pipeline.example_inputs import example_inputs, made
from gradsplit.distributed.pipeline.graph_facts import GraphFacts
from gradsplit.distributed.pipeline.node_costs import across_cuts
from gradsplit.distributed.pipeline.split_graph import split_graph
from gradsplit.distributed.pipeline.stage_programs import StageProgram

logger = logging.getLogger(__name__)

# How many pieces a stage has, about: of more, each would be too small for the clock.
_PIECES_A_STAGE = 12
# How many nodes a cut is compared with, on either side.
_NEAR = 16
# Different pieces that are compiled at the most.
_MOST_COMPILED = 24
_WARM_UP, _REPEATS = 3, 12


def seconds_as_compiled(
    exported: Exported,
    facts: GraphFacts,
    call: Sequence[torch.Tensor],
    seconds: Sequence[float],
    num_stages: int,
) -> list[float]:
    """Of one microbatch's forward and backward of each node, as its share of the compiled piece that it is in.

    Args:
        call: of one microbatch; see ``example_call``.
        seconds: of nodes one by one, which tell what share of a piece each is.
    """
    cuts = _narrow_cuts(facts, seconds, sum(seconds) / (_PIECES_A_STAGE * num_stages))
    split = split_graph(exported, facts, cuts, seconds, 1)
    known: dict[tuple[Any, ...], float | None] = {}
    found = [*seconds]
    factors = []
    left = []
    ends = pairwise([0, *cuts, len(facts.nodes)])
    for piece, own, (first, end) in zip(split.stages, split.layout.stages, ends, strict=True):
        shape = _shape_of(piece)
        if shape not in known and len(known) < _MOST_COMPILED:
            given = [
                call[-1 - edge] if edge < 0 else made(argument, piece.device)
                for edge, argument in zip(own.inputs, piece.arguments, strict=True)
            ]
            known[shape] = _measure(piece, given)
        measured, alone = known.get(shape), sum(seconds[first:end])
        if measured is None or not alone:
            left.append((first, end))
            continue
        factors.append(measured / alone)
        found[first:end] = [factors[-1] * one for one in seconds[first:end]]
    # What was not timed is as much faster as the others are.
    usual = statistics.median(factors) if factors else 1.0
    for first, end in left:
        found[first:end] = [usual * one for one in seconds[first:end]]
    return found


def seconds_of_loss(
    exported: Exported,
    call: Sequence[torch.Tensor],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    target: Any,
) -> float:
    """Of one microbatch's loss, compiled, and its gradient."""
    with torch.no_grad():
        given = example_inputs(exported, call)
        results = fx.Interpreter(fx.GraphModule({}, exported.graph)).run(*given)
    output = tree_map_only(
        torch.Tensor,
        lambda result: result.detach().requires_grad_(result.is_floating_point()),
        build(exported.result, results),
    )
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    compiled = api.compile(loss_fn)

    def run() -> None:
        torch.autograd.grad(compiled(output, target), leaves, allow_unused=True)

    with torch.enable_grad():
        return _device_seconds(run, exported.device != "cpu")


def _narrow_cuts(facts: GraphFacts, seconds: Sequence[float], least_s: float) -> tuple[int, ...]:
    """Cuts that no fewer values cross than those near them, with pieces of some length between them."""
    crossing = across_cuts(facts, lambda node: 1)[: len(facts.nodes)]
    found, since_s, place = [], 0.0, 0
    for cut in facts.cuts:
        since_s += sum(seconds[place:cut])
        place = cut
        if since_s >= least_s and crossing[cut] <= min(crossing[max(1, cut - _NEAR) : cut + _NEAR]):
            found.append(cut)
            since_s = 0.0
    return tuple(found)


def _shape_of(piece: Exported) -> tuple[Any, ...]:
    """Alike for pieces that do the same with tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}
    described: list[Any] = []
    for node in piece.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        numbers[node] = len(numbers)
        given: Any = None
        if node.op == "placeholder" and node.meta["kind"] != "argument":
            held = piece.tensors[node.meta["path"]]
            given = tuple(held.shape), held.dtype, isinstance(held, torch.nn.Parameter)
        elif node.op == "placeholder":
            argument = piece.arguments[node.meta["path"]]
            given = argument.example, argument.dtype, argument.requires_grad
        target = "" if node.op == "placeholder" else str(node.target)
        described.append((node.op, target, repr(arguments), given))
    return tuple(described)


def _measure(piece: Exported, call: Sequence[torch.Tensor]) -> float | None:
    """Seconds of its compiled forward and backward; None if it cannot be run alone."""
    inputs = example_inputs(piece, call)
    is_weight = [node.meta["kind"] == "parameter" for node in piece.graph.find_nodes(op="placeholder")]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    program = StageProgram(piece.graph, is_weight, CompileRequest.of(True, None, None, None, None))

    def run() -> None:
        results = [result for result in program(inputs) if isinstance(result, torch.Tensor)]
        results = [result for result in results if result.requires_grad]
        if results and leaves:
            seeds = [torch.randn_like(result) for result in results]
            torch.autograd.grad(results, leaves, seeds, allow_unused=True)

    try:
        with torch.enable_grad():
            return _device_seconds(run, piece.device != "cpu")
    except Exception as error:
        logger.warning("%s is not timed as a program: %s", piece.name, error)
        return None


def _device_seconds(run: Callable[[], None], is_gpu: bool) -> float:
    """The device's own time for a run, the least of some: a host may launch more slowly than its GPU computes."""
    for _ in range(_WARM_UP):
        run()
    if not is_gpu:
        return min(_thread_seconds(run) for _ in range(_REPEATS))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(_REPEATS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _thread_seconds(run: Callable[[], None]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start
