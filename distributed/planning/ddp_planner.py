"""Plans the backwards of a ``DistributedDataParallel`` module's graphs, and the buckets that they fill together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing.bucket import BucketPlan, Parameter
from gradsplit.bucketing.reducer_plan import reducer_plan
from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.ir.communicator import Communicator, Program
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.print_graph import print_schedule
from gradsplit.compile_core.ir.regions import graph_results, whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.runtime.graphed_program import MOST_AT_ONCE
from gradsplit.distributed.gradients.ddp_communicator import DDPCommunicator
from gradsplit.distributed.planning.cut_backward import cut_backward
from gradsplit.distributed.planning.plan_segments import plan_segments
from gradsplit.distributed.reducer.stock_buckets import bucket_limits


def describe(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Parameter]:
    """Parameters as planning sees them, by name."""
    # Ranks compare plans, so a device is named by its place among the module's own, not by this rank's index.
    devices = list(dict.fromkeys(parameter.device for parameter in parameters.values()))
    labels = {
        device: device.type if place == 0 else f"{device.type} ({place + 1} of {len(devices)})"
        for place, device in enumerate(devices)
    }
    return {
        name: Parameter(
            name, parameter.numel(), parameter.element_size(), str(parameter.dtype), labels[parameter.device]
        )
        for name, parameter in parameters.items()
    }


class DDPPlanner:
    """A ``SchedulePlanner`` for one module.

    Graphs are cut into segments when they are compiled; which segments' gradients share a bucket is decided apart from
    that, once for all graphs of the module.

    Args:
        compiling: reports to the other ranks that this one compiles, while it does.

    Attributes:
        communicator: has the gradients reduced.
        hooked: parameters whose gradients the graph that is planned next must leave to the engine.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        communicator: DDPCommunicator,
        compiling: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.in_flight = MOST_AT_ONCE
        self._ddp = ddp
        self.compiling = compiling
        self.communicator = communicator
        self._buckets = communicator.buckets
        self.hooked: frozenset[str] = frozenset()
        # By graph, in the order in which they were planned: parameters as autograd completes their gradients. That is
        # the same for all sizes, which ranks may differ in; the order of segments is not.
        self._ready: list[list[str]] = []

    def plan_backward(
        self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]
    ) -> tuple[Schedule, Communicator | None]:
        """The backward cut into segments; see ``SchedulePlanner``."""
        assert graph.backward is not None
        gradients = self._gradients(graph, inputs)
        if not gradients:
            return whole_schedule("backward", graph.backward), None
        backward, factor = graph.backward, self._buckets.averaging.factor
        segments = plan_segments(backward, gradients)
        place = {node: number for number, node in enumerate(backward.graph.nodes)}
        results = graph_results(backward)
        self._ready.append(sorted(gradients, key=lambda name: place[results[gradients[name]]]))
        schedule = cut_backward(backward, gradients, segments, factor, self._buckets.strides)
        log_artifact(
            "ddp_graphs", lambda: f"a backward in {len(segments)} segments:\n{print_schedule(schedule)}"
        )
        return schedule, self.communicator

    def backward_program(self, graph: PartitionedGraph, forward: Program, backward: Program) -> Program:
        """The backward itself; see ``SchedulePlanner``."""
        del graph, forward
        return backward

    def first_order(self) -> dict[str, Any]:
        """What the first plan is made of, as plain data for all ranks: the order in which gradients become ready as far
        as the graphs tell, and the limits of buckets."""
        # The engine runs the backwards of the last graphs first.
        known = [name for ready in reversed(self._ready) for name in ready]
        unknown = [name for name in reversed(self._buckets.parameters) if name not in set(known)]
        return {
            "ready": list(dict.fromkeys([*known, *unknown])),
            "limits": bucket_limits(self._ddp),
        }

    def first_plan(self, order: Mapping[str, Any]) -> BucketPlan:
        """Stock DDP's buckets, for what the first rank says in ``first_order``."""
        described = describe(self._buckets.parameters)
        plan = reducer_plan([described[name] for name in order["ready"]], order["limits"])
        log_artifact("ddp_graphs", lambda: f"the first plan, as stock DDP's:\n{plan}")
        return plan

    def _gradients(self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> Mapping[str, int]:
        """Where gradients to be reduced stand among the backward's results; parameters are recognised by identity."""
        assert graph.backward is not None
        names = {id(parameter): name for name, parameter in self._buckets.parameters.items()}
        found: dict[str, int] = {}
        results = graph_results(graph.backward)
        for k, (position, gradient) in enumerate(zip(graph.signature.gradient_inputs, results, strict=True)):
            name = names.get(id(inputs[position]))
            if name is not None and gradient is not None and name not in self.hooked:
                found[name] = k
        return found
