"""Runs traced and partitioned regions with torch's own kernels: capture and autograd are ours, code
generation is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.graph import CodeGen

from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.observe.diagram import draw_graph
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.runtime.executable import Region


def decompositions(device_type: str, options: CompileOptions) -> Mapping[Any, Callable[..., Any]]:
    """None: every operator runs as torch wrote it."""
    del device_type, options
    return {}


def compile_region(compute: Compute, options: CompileOptions, dump: StageDump) -> Callable[[], Region]:
    """Interprets the region's graph; a result with a destination is copied there."""
    del options
    dump.diagram(f"{compute.name}.graph", lambda: draw_graph(compute.name, compute.module))
    run = storing(_taking_a_list(compute.module), compute)
    return lambda: run


def storing(run: Callable[[list[Any]], Sequence[Any]], compute: Compute) -> Region:
    """What computes a region's outputs, as a ``Region``: a result with a destination is copied there."""
    num_inputs = len(compute.inputs)
    stored = [compute.outputs.index(name) for name in compute.destinations]
    if not stored:
        return run

    def run_and_store(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        destinations = arguments[num_inputs:]
        del arguments[num_inputs:]
        results = list(run(arguments))
        for k, destination in zip(stored, destinations, strict=True):
            results[k] = destination.copy_(results[k])
        return results

    return run_and_store


def _taking_a_list(module: torch.fx.GraphModule) -> Region:
    """The graph as a function of one list."""
    graph = torch.fx.Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    graph.set_codegen(_TakingAList())
    return torch.fx.GraphModule(module, graph).forward


class _TakingAList(CodeGen):
    """Code that empties the list of its inputs, so that each is free after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        del options
        names = [name.partition(":")[0].partition("=")[0].strip() for name in free_vars if name != "self"]
        taken = "".join(f"{name}, " for name in names)
        lines = [f"def {self._func_name}(self, arguments){maybe_return_annotation}:"]
        lines += [f"    {taken}= arguments", "    arguments.clear()"] if names else []
        return "\n".join(lines)
