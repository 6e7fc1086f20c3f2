"""Runs traced and partitioned regions with torch's own kernels: capture and autograd are ours, code
generation is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_core.ir.schedule import Compute
from compile_core.observe.diagram import draw_graph
from compile_core.observe.dump import StageDump
from compile_core.options import CompileOptions
from compile_core.runtime.executable import Region


def decompositions(device_type: str, options: CompileOptions) -> Mapping[Any, Callable[..., Any]]:
    """None: every operator runs as torch wrote it."""
    del device_type, options
    return {}


def compile_region(compute: Compute, options: CompileOptions, dump: StageDump) -> Region:
    """Interprets the region's graph; a result with a destination is copied there."""
    del options
    dump.diagram(f"{compute.name}.graph", lambda: draw_graph(compute.name, compute.module))
    num_inputs = len(compute.inputs)
    stored = [(k, position) for position, k in enumerate(_stored_outputs(compute))]

    def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            results = list(compute.module(*arguments[:num_inputs]))
            for k, position in stored:
                results[k] = arguments[num_inputs + position].copy_(results[k])
        return results

    return run


def _stored_outputs(compute: Compute) -> list[int]:
    return [compute.outputs.index(name) for name in compute.destinations]
