"""Regions as bytes: to a process that makes loops and kernels of them, and what it made back.

Operators go by their names, fake tensors by their sizes and strides. A tensor that the graph holds goes as a fake one,
but for those of few elements, which kernels may have built in; in a loop program that comes back, each is the name of
the attribute that holds it.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.open_graphs import OpenGraph, OpenTensor
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.lowering.triton_kernels.build_triton import GpuTarget, gpu_target
from gradsplit.compile_core.options import CompileOptions

# What every process knows that has imported torch and this package.
_NAMESPACES = frozenset({"aten", "prims", "mkldnn", "gradsplit"})
_MOST_ELEMENTS = 16

_mode = FakeTensorMode()


@dataclass(frozen=True)
class RegionRequest:
    """A region with open sizes, to be compiled for some.

    Attributes:
        graph: the region's graph.
        signature: the region without its graph and without numbers.
        attributes: the tensors that the graph holds, by name.
        threads: of torch's operators in the process that asks.
        targets: what kernels are compiled for, by device.
    """

    graph: OpenGraph
    signature: Compute
    attributes: dict[str, torch.Tensor]
    options: CompileOptions
    threads: int
    targets: Mapping[torch.device, GpuTarget]


def reason_against(graph: OpenGraph) -> str:
    """Why another process cannot compile a region, or ""."""
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or node.is_number:
            continue
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace not in _NAMESPACES:
                return f"{target} is known in this process only"
        elif getattr(target, "__module__", None) not in ("_operator", "torch"):
            return f"{target} is known in this process only"
    return ""


def region_request(
    graph: OpenGraph, signature: Compute, module: GraphModule, options: CompileOptions
) -> RegionRequest:
    """What is sent; ``signature`` is the region of ``module`` without numbers."""
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    attributes = {}
    for name in names:
        tensor = operator.attrgetter(name)(module).detach()
        is_small = tensor.device.type == "cpu" and tensor.numel() <= _MOST_ELEMENTS
        attributes[name] = tensor if is_small else _mode.from_tensor(tensor)
    bare = replace(signature, module=None)  # type: ignore[arg-type]
    values = [value for node in graph.nodes for value in tree_leaves(node.value)]
    devices = {value.device for value in values if isinstance(value, (OpenTensor, torch.Tensor))}
    targets = {device: gpu_target(device) for device in devices if device.type == "cuda"}
    return RegionRequest(graph, bare, attributes, options, torch.get_num_threads(), targets)


def named_constants(program: LoopProgram, module: GraphModule) -> LoopProgram:
    """The program with the attribute's name in the place of each tensor that the graph holds."""
    targets = {node.name: str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return replace(program, constants={name: targets[name] for name in program.constants})  # type: ignore[misc]


def with_constants(program: LoopProgram, module: GraphModule) -> LoopProgram:
    """The reverse, where the tensors are."""
    constants = {
        name: operator.attrgetter(str(target))(module).detach() for name, target in program.constants.items()
    }
    return replace(program, constants=constants)


def packed(value: Any) -> bytes:
    """
    Raises:
        Exception: it holds something that is known in this process only.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpacked(data: bytes) -> Any:
    """The value of bytes that a process of ours has packed."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            namespace, name = value._schema.name.split("::")
            return _operator, (namespace, name, value._overloadname)
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided:
                raise pickle.PicklingError(f"a tensor of the layout {value.layout}")
            return _fake_tensor, (OpenTensor.of(value),)
        if isinstance(value, torch.Size):
            return tuple, (tuple(value),)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _fake_tensor(spec: OpenTensor) -> torch.Tensor:
    with _mode:
        return spec.empty()
