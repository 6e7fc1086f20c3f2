"""Segments of a backward: valid whatever the graph, and good where one can say what is good."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from gradsplit.bucketing.link_model import LinkModel
from gradsplit.compile_core.ir.regions import graph_results
from gradsplit.distributed.planning.backward_costs import OrderCosts, node_facts
from gradsplit.distributed.planning.cut_backward import Segment
from gradsplit.distributed.planning.plan_segments import GPU, plan_segments
from tests.distributed.planning.recorded_backwards import recorded

aten = torch.ops.aten
_SIDE = 2048


def random_backward(seed: int) -> tuple[GraphModule, dict[str, int]]:
    """Products, pointwise operators, views, sums and calls of several results of square matrices."""
    choose = random.Random(seed)
    graph = Graph()
    with FakeTensorMode():
        values = []
        for number in range(3):
            values.append(graph.placeholder(f"saved_{number}"))
            values[-1].meta["val"] = torch.empty(_SIDE, _SIDE)

        def add(target, *args, **kwargs) -> Node:
            node = graph.call_function(target, args, kwargs)
            node.meta["val"] = target(
                *(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args), **kwargs
            )
            return node

        for _ in range(choose.randrange(4, 40)):
            one, other = choose.choices(values[-8:], k=2)
            kind = choose.randrange(7)
            if kind < 2:
                values.append(add(aten.mm.default, one, other))
            elif kind == 2:
                values.append(add(aten.add.Tensor, one, other))
            elif kind == 3:
                values.append(add(aten.t.default, one))
            elif kind == 4:
                row = add(aten.sum.dim_IntList, one, [0], True)
                values.append(add(aten.mul.Tensor, row, other))
            elif kind == 5:
                wide = add(aten._to_copy.default, one, dtype=torch.float64)
                values.append(add(aten._to_copy.default, wide, dtype=torch.float32))
            else:
                both = add(aten.sort.default, one)
                values.append(add(operator.getitem, both, 0))
    results = choose.choices(values, k=choose.randrange(1, 9))
    results += [node for node in values if not node.users and node not in results]
    graph.output(tuple(results))
    names = [f"w{k}" for k in range(len(results)) if choose.random() < 0.8] or ["w0"]
    return GraphModule({}, graph), {name: int(name[1:]) for name in names}


def peak(module: GraphModule, gradients: dict[str, int], order: Iterable[Node]) -> int:
    results = graph_results(module)
    stored = [results[position] for position in gradients.values()]
    returned = [node for k, node in enumerate(results) if k not in gradients.values()]
    costs = OrderCosts(list(order), node_facts(module.graph.nodes, GPU.rates), stored, returned)  # type: ignore[arg-type]
    return max(costs.live_bytes(), default=0)


def nodes_of(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def check(module: GraphModule, gradients: dict[str, int], segments: tuple[Segment, ...]) -> None:
    order = [node for segment in segments for node in segment.nodes]
    assert sorted(order, key=str) == sorted(nodes_of(module), key=str)
    done = {node for node in module.graph.nodes if node.op == "placeholder"}
    results = graph_results(module)
    named: list[str] = []
    for segment in segments:
        here = set(segment.nodes)
        for node in segment.nodes:
            assert done.issuperset(node.all_input_nodes), f"{node} runs before what it reads"
            assert node.target is not operator.getitem or node.args[0] in here, "only tensors pass on"
            done.add(node)
        assert all(results[gradients[name]] in done for name in segment.gradients)
        named += segment.gradients
    assert sorted(named) == sorted(gradients)
    assert all(segment.gradients for segment in segments[:-1])
    assert peak(module, gradients, order) <= peak(module, gradients, nodes_of(module))


def test_random_backwards() -> None:
    machine = replace(GPU, cut_s=1e-6)
    kinds = set()
    for seed in range(100):
        module, gradients = random_backward(seed)
        segments = plan_segments(module, gradients, machine)
        check(module, gradients, segments)
        order = [node for segment in segments for node in segment.nodes]
        kinds.add((len(segments) > 1, order != nodes_of(module)))
    for some in zip(*kinds, strict=True):
        assert set(some) == {False, True}, "some are cut, and some run in another order"


def layers(
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    w4: Tensor,
    w5: Tensor,
    w6: Tensor,
    w7: Tensor,
    table: Tensor,
) -> Tensor:
    """Eight layers on rows that are taken from a table."""
    rows = table[:4096].relu()
    for weight in (w0, w1, w2, w3, w4, w5, w6, w7):
        rows = F.linear(rows, weight).relu()
    return rows


def planned(width: int, table_rows: int) -> tuple[tuple[Segment, ...], list[str]]:
    """The segments of these layers, and the parameters in the order in which they are ready; a table without rows of
    its own is no parameter."""
    shapes = {f"w{k}": (width, width) for k in range(8)}
    module, gradients = recorded(layers, **shapes, table=(max(table_rows, 4096), width))
    if not table_rows:
        del gradients["table"]
    segments = plan_segments(module, gradients)
    check(module, gradients, segments)
    return segments, [name for segment in segments for name in segment.gradients]


def test_what_is_large_and_ready_last_is_hidden_under_products() -> None:
    segments, ready = planned(2048, table_rows=32768)
    assert ready[0] == "w7"
    behind = ready[ready.index("table") + 1 :]
    assert behind and behind == sorted(behind, reverse=True) and behind[-1] == "w0"
    assert "table" not in segments[-1].gradients


def test_equal_layers_keep_their_order() -> None:
    segments, ready = planned(2048, table_rows=0)
    assert ready == ["w7", "w6", "w5", "w4", "w3", "w2", "w1", "w0"]
    assert 3 <= len(segments) <= 8
    assert len(segments[0].gradients) <= 2, "a slow link can start early"
    assert len(segments[-1].gradients) <= 2, "a fast link has little to do behind the end"


def test_short_backwards_are_one_region() -> None:
    segments, _ = planned(64, table_rows=4096)
    assert len(segments) == 1


class _Builder:
    """A backward whose values are known by shape."""

    def __init__(self) -> None:
        self.graph = Graph()

    def saved(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        with FakeTensorMode():
            node.meta["val"] = torch.empty(*shape, device="cuda:0")
        return node

    def call(self, target: Callable[..., Any], shape: Sequence[int], *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        with FakeTensorMode():
            node.meta["val"] = torch.empty(*shape, device="cuda:0")
        return node

    def module(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        return GraphModule({}, self.graph)


def test_what_waits_may_not_take_more_memory_than_the_peak() -> None:
    """The last gradient is a product of a temporary, when all that the layers saved is freed, but for what waits."""
    build = _Builder()
    square = (2048, 2048)
    gradient = build.saved("arriving", *square)
    results = []
    for k in range(8):
        saved = build.saved(f"saved_{k}", *square)
        results.append(build.call(aten.mm.default, square, gradient, saved))
        gradient = build.call(aten.mm.default, square, gradient, build.saved(f"weight_{k}", *square))
    temporary = build.call(aten.cat.default, (16384, 2048), [gradient] * 8)
    results.append(build.call(aten.mm.default, (16384, 2048), temporary, gradient))
    module = build.module(*results)
    gradients = {f"w{k}": k for k in range(9)}
    # On a link on which a gradient is sent as fast as it is computed, so that waiting is worth it.
    machine = replace(GPU, links=(LinkModel(10e-6, 1 / 300e9),))
    segments = plan_segments(module, gradients, machine)
    check(module, gradients, segments)
    ready = [name for segment in segments for name in segment.gradients]
    assert 0 < ready.index("w8") < 8, "some could wait, others would have to be kept for too long"


def test_a_graph_that_changes_memory_keeps_its_order() -> None:
    build = _Builder()
    square = (4096, 4096)
    saved = build.saved("saved", *square)
    first = build.call(aten.mm.default, square, saved, saved)
    second = build.call(aten.mm.default, square, first, first)
    third = build.call(aten.mm.default, square, second, first)
    build.call(aten.copy_.default, square, saved, second)
    module = build.module(third, build.call(aten.cat.default, (16 * 4096, 4096), [second] * 16))
    order = [node for segment in plan_segments(module, {"w": 0, "v": 1}) for node in segment.nodes]
    assert order == nodes_of(module)
