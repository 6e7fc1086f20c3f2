"""A region with sizes that depend on data: torch's kernels run the operators concerned, between programs for the rest.

The region becomes a schedule of its own. Each operator that reads or gives a tensor of such a size, or a number out of
data, is computed *apart*, by torch's kernels; all others, of which a backend knows the sizes before the region runs,
are regions for the backend. An operator is computed as early as what it reads allows, so a mixture of experts is three
regions: what comes before the experts, the experts, what comes behind them.

Numbers that the sizes of the region's inputs determine are computed wherever they are read. Operators that draw random
numbers stay in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.backends.aot_eager import storing
from gradsplit.compile_core.ir.data_checks import CHECK
from gradsplit.compile_core.ir.numbers import is_number, is_sized_by_data
from gradsplit.compile_core.ir.regions import build_region, graph_inputs, graph_results
from gradsplit.compile_core.ir.schedule import Compute, Schedule
from gradsplit.compile_core.runtime.executable import Region, link
from gradsplit.compile_core.torch_facts.dispatcher import is_random

CompileRegion = Callable[[Compute], Callable[[], Region]]


def has_data_sizes(module: GraphModule) -> bool:
    """Whether a graph has a number, or a tensor of a size, that is known only when the graph has read data."""
    return any(map(_gives_data_size, module.graph.nodes))


# Of so few operators it matters little which kernels run them.
_FEW_OPERATORS = 32


def is_mostly_of_data(captured: GraphModule) -> bool:
    """Whether most of what a captured graph computes has sizes that depend on data: behind a break, kernels would be
    generated for the sizes that come, as many as there may be of them."""
    examples = [node.meta.get("example_value") for node in captured.graph.nodes if node.op.startswith("call")]
    tensors = [example for example in examples if isinstance(example, Tensor)]
    of_data = sum(map(is_sized_by_data, tensors))
    return of_data > max(len(tensors) // 2, _FEW_OPERATORS)


def compile_around_data(
    compute: Compute, compile_known: CompileRegion, compile_apart: CompileRegion
) -> Callable[[], Region]:
    """Starts to compile such a region; what it returns waits for that.

    Args:
        compile_known: compiles a region whose sizes are known before it runs.
        compile_apart: compiles one with sizes that depend on data.
    """
    schedule, apart = split_at_data(compute)
    log_artifact("perf_hints", lambda: _hint(compute, schedule, apart))
    started = {
        part.name: (compile_apart if part.name in apart else compile_known)(part)
        for part in schedule.computes
    }
    return lambda: storing(link(schedule, {name: wait() for name, wait in started.items()}), compute)


def split_at_data(compute: Compute) -> tuple[Schedule, frozenset[str]]:
    """The region as a schedule of regions, and the names of those that are computed apart."""
    module = compute.module
    inputs = graph_inputs(module)
    results = [node for node in graph_results(module) if node is not None]
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    anywhere = _sizes_of(inputs, nodes)
    levels = _levels([node for node in nodes if node not in anywhere])
    wanted = set(results)
    read_at: dict[Node, set[int]] = {}
    for node, level in levels.items():
        for source in node.all_input_nodes:
            read_at.setdefault(source, set()).add(level)
    names = {position: f"{compute.name}_part{position}" for position in sorted({*levels.values()})}
    parts = []
    for position, name in names.items():
        own = {node for node, level in levels.items() if level == position}
        own |= _needed_sizes(own, anywhere)
        if position == min(names):
            # Sizes that the region returns.
            own |= _needed_sizes(wanted & anywhere, anywhere) | (wanted & anywhere)
        given = [
            node
            for node in nodes
            if node in own
            and (node in wanted or read_at.get(node, set()) - {position})
            and (node not in anywhere or (node in wanted and position == min(names)))
        ]
        parts.append(build_region(name, module, [node for node in nodes if node in own], given))
    schedule = Schedule(
        name=compute.name,
        inputs=tuple(node.name for node in inputs),
        computes=tuple(parts),
        outputs=tuple(node.name for node in results),
    )
    return schedule, frozenset(name for position, name in names.items() if position % 2)


def _sizes_of(inputs: Sequence[Node], nodes: Sequence[Node]) -> set[Node]:
    """The numbers that follow from sizes of the inputs."""
    found: set[Node] = set()
    known = {*inputs}
    for node in nodes:
        if is_number(node) and not _gives_data_size(node) and known.issuperset(node.all_input_nodes):
            found.add(node)
            known.add(node)
    return found


def _needed_sizes(readers: set[Node], anywhere: set[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = [*readers]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in anywhere and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _levels(nodes: Sequence[Node]) -> dict[Node, int]:
    """By node, in which region of the schedule it is: the odd ones are computed apart."""
    levels: dict[Node, int] = {}
    last_drawn: Node | None = None
    for node in nodes:
        apart = (
            node.target is CHECK or _gives_data_size(node) or any(map(_gives_data_size, node.all_input_nodes))
        )
        level = int(apart)
        before = list(node.all_input_nodes)
        if is_random(node):
            before += [] if last_drawn is None else [last_drawn]
            last_drawn = node
        for source in before:
            if source in levels:
                level = max(level, levels[source] + (levels[source] % 2 != int(apart)))
        levels[node] = level
    return levels


def _gives_data_size(node: Node) -> bool:
    return is_sized_by_data(node.meta.get("val"))


def _hint(compute: Compute, schedule: Schedule, apart: frozenset[str]) -> str:
    counts = {part.name: len(part.module.graph.nodes) for part in schedule.computes}
    shown = sum(count for name, count in counts.items() if name in apart)
    of_all = f"{shown} of {sum(counts.values())} operators"
    return f"{compute.name}: torch's kernels run {of_all}, whose sizes depend on data"
