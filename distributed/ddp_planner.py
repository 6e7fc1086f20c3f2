"""Plans the backward of a ``DistributedDataParallel`` module's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES
from torch.nn.parallel import DistributedDataParallel

from bucketing.bucket import BucketPlan, Parameter
from bucketing.reducer_plan import reducer_plan
from compile_core.errors import Unsupported
from compile_core.ir.graphs import PartitionedGraph
from compile_core.ir.regions import graph_results
from compile_core.ir.schedule import Schedule
from compile_core.runtime.communicator import Communicator
from distributed.cut_backward import cut_backward
from distributed.gradient_buckets import GradientBuckets


def process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The group that the module reduces over."""
    group = ddp.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients the module reduces, by name; a tied one has its first name only."""
    ignored = ddp.parameters_to_ignore
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


class DDPPlanner:
    """A ``SchedulePlanner`` for one module: the first graph fixes the buckets, later graphs fill the same
    ones.

    That every graph of a module reduces the same buckets in the same order is what lets one rank recompile
    alone, for instance for a short last batch.

    Attributes:
        parameters: those whose gradients are reduced, by name.
        buckets: their buffers; ``None`` until the first graph is planned.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.parameters = reduced_parameters(ddp)
        self.buckets: GradientBuckets | None = None

    def plan_backward(
        self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]
    ) -> tuple[Schedule, Communicator]:
        """The backward cut at bucket boundaries; see ``SchedulePlanner``."""
        assert graph.backward is not None
        gradients = self._gradients(graph, inputs)
        if self.buckets is None:
            order = {node: position for position, node in enumerate(graph.backward.graph.nodes)}
            results = graph_results(graph.backward)
            ready = sorted(gradients, key=lambda name: order[results[gradients[name]]])
            self.buckets = GradientBuckets(self._plan(ready), self.parameters, process_group(self._ddp))
        return cut_backward(graph.backward, gradients, self.buckets.plan, self.buckets.factor), self.buckets

    def _gradients(self, graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> Mapping[str, int]:
        """Where each parameter's gradient stands among the backward's results; identity tells parameters."""
        assert graph.backward is not None
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        found: dict[str, int] = {}
        results = graph_results(graph.backward)
        for k, (position, gradient) in enumerate(zip(graph.signature.gradient_inputs, results, strict=True)):
            name = names.get(id(inputs[position]))
            if name is not None and gradient is not None:
                found[name] = k
        unused = [name for name in self.parameters if name not in found]
        if unused:
            raise Unsupported(
                "unused-parameter",
                f"the loss does not depend on {len(unused)} parameters of the module, such as {unused[0]!r}",
                "pass find_unused_parameters=True to DistributedDataParallel, or freeze them",
            )
        for name, parameter in self.parameters.items():
            if not parameter.is_contiguous():
                raise Unsupported("parameter-layout", f"parameter {name!r} is not contiguous")
        return found

    def _plan(self, ready: Sequence[str]) -> BucketPlan:
        # Ranks compare plans, so a device is named by its place among the module's own, not by this rank's index.
        devices = list(dict.fromkeys(parameter.device for parameter in self.parameters.values()))
        parameters = [_describe(name, self.parameters[name], devices) for name in ready]
        cap = self._ddp.bucket_bytes_cap
        first = min(cap, _DEFAULT_FIRST_BUCKET_BYTES) if self._ddp.bucket_bytes_cap_default else cap
        return reducer_plan(parameters, cap, first)


def _describe(name: str, parameter: torch.nn.Parameter, devices: list[torch.device]) -> Parameter:
    place = devices.index(parameter.device)
    device = (
        parameter.device.type if place == 0 else f"{parameter.device.type} ({place + 1} of {len(devices)})"
    )
    return Parameter(name, parameter.numel(), parameter.element_size(), str(parameter.dtype), device)
