"""What it costs on a GPU to cut a backward into regions, and to have it run in another order: no communication.

    python -m tests.bench.segment_cost [--models gpt2,resnet50,bert] [--rows 10]

Each backward is run alone, on saved values made up: whole, as one process has it, and in the regions and the order that
`plan_segments` chooses where cuts cost less and less, its gradients stored in buffers that stay. Milliseconds are
medians by CUDA events, of variants that take turns in rows, on a GPU that has worked for a while; peaks are of
allocated memory beside those buffers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.graphs import PartitionedGraph
from gradsplit.compile_core.ir.regions import graph_inputs, graph_results, whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph
from gradsplit.compile_core.runtime.executable import Executable, link
from gradsplit.distributed.planning.cut_backward import cut_backward
from gradsplit.distributed.planning.plan_segments import GPU, plan_segments
from tests.bench.ddp_steps import load_model
from tests.bench.rows import rows_in_turn, run_row

# By name what a cut is said to cost: from one region to many.
_CUTS_S = {"one": 1.0, "80 us": 80e-6, "20 us": 20e-6}
_WARM_UP_S = 1.5
_IN_A_ROW = 5
# No table of these models is shorter, but for those whose gradients take no indices.
_FEWEST_ROWS = 512


class _TracedError(Exception):
    """Ends a compilation where the backward is known."""


@dataclass
class _Buffers:
    """Destinations from which nothing is sent."""

    places: dict[str, Tensor]

    def usual_places(self, names: Sequence[str]) -> None:
        pass

    def destinations(self, names: Sequence[str]) -> list[Tensor]:
        return [self.places[name] for name in names]

    def arrived(self, names: Sequence[str], values: Mapping[str, Tensor] | None) -> None:
        pass


@dataclass
class _Backward:
    executable: Executable
    buffers: _Buffers

    def __call__(self, saved: list[Tensor]) -> None:
        self.executable(saved, self.buffers)


class _Planner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.gradients: dict[str, int] = {}
        self.graph: PartitionedGraph | None = None

    def compiling(self, what: str) -> Any:
        del what
        return nullcontext()

    def plan_backward(self, graph: PartitionedGraph, inputs: Sequence[Tensor]) -> Any:
        assert graph.backward is not None
        results = graph_results(graph.backward)
        for k, (position, gradient) in enumerate(zip(graph.signature.gradient_inputs, results, strict=True)):
            name = self.names.get(id(inputs[position]))
            if name is not None and gradient is not None:
                self.gradients[name] = k
        self.graph = graph
        raise _TracedError


def traced(model: torch.nn.Module, inputs: dict[str, Tensor], backend: RegionBackend) -> _Planner:
    """The backward of a training step under bf16 autocast."""
    planner = _Planner(model)
    only_traced: Any = replace(backend, compile_region=lambda *_: None)
    compile_local = partial(compile_graph, backend=only_traced, options=CompileOptions(), planner=planner)
    try:
        with torch.autocast(next(iter(inputs.values())).device.type, torch.bfloat16):
            CompiledFunction(model, compile_local, fullgraph=True)(**inputs)
    except _TracedError:
        pass
    return planner


def schedules(planner: _Planner) -> dict[str, Schedule]:
    assert planner.graph is not None and planner.graph.backward is not None
    backward = planner.graph.backward
    found = {"whole": whole_schedule("backward", backward)}
    for label, cut_s in _CUTS_S.items():
        segments = plan_segments(backward, planner.gradients, replace(GPU, cut_s=cut_s))
        found[f"cut at {label}"] = cut_backward(backward, planner.gradients, segments, 1.0, {})
    return found


def made_up(planner: _Planner) -> list[Tensor]:
    """Values for the backward's inputs."""
    assert planner.graph is not None and planner.graph.backward is not None
    made = []
    for node in graph_inputs(planner.graph.backward):
        value = node.meta["val"]
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if value.dtype.is_floating_point:
            flat = torch.rand(reach + 1, device=value.device)
        else:
            flat = torch.randint(
                0, 2 if value.dtype is torch.bool else _FEWEST_ROWS, (reach + 1,), device=value.device
            )
        made.append(flat.to(value.dtype).as_strided(value.shape, value.stride()))
    return made


def compiled(schedule: Schedule, backend: RegionBackend, places: dict[str, Tensor]) -> _Backward:
    options = CompileOptions()
    started = {
        step.name: backend.compile_region(step, options, StageDump(None, None)) for step in schedule.computes
    }
    return _Backward(link(schedule, {name: finish() for name, finish in started.items()}), _Buffers(places))


def peak_mib(run: Callable[[list[Tensor]], Any], saved: list[Tensor]) -> float:
    """The most that is allocated while the values are given away and used, beside what else is."""
    others = torch.cuda.memory_allocated() - sum(tensor.untyped_storage().nbytes() for tensor in saved)
    torch.cuda.reset_peak_memory_stats()
    run(saved)
    return (torch.cuda.max_memory_allocated() - others) / 2**20


def measure(name: str, rows: int) -> None:
    backend = resolve_backend("triton")
    assert isinstance(backend, RegionBackend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, inputs = load_model(name, device.type)
    model = model.to(device)
    planner = traced(model, {key: value.to(device) for key, value in inputs.items()}, backend)
    places = {key: torch.empty_like(value) for key, value in model.named_parameters()}
    model.cpu()
    begin = time.perf_counter()
    executables = {
        label: compiled(schedule, backend, places) for label, schedule in schedules(planner).items()
    }
    compile_s = time.perf_counter() - begin
    peaks: dict[str, float] = dict.fromkeys(executables, 0.0)
    with torch.no_grad():
        for label, executable in executables.items():
            executable(made_up(planner))  # libraries choose their kernels
            if device.type == "cuda":
                peaks[label] = peak_mib(executable, made_up(planner))
        saved = made_up(planner)
        times_ms = backward_ms(executables, saved, device, rows)
    print(f"{name}: compiled in {compile_s:.0f} s")
    for label, executable in executables.items():
        took_ms = statistics.median(times_ms[label])
        ratio = statistics.median(map(truediv, times_ms[label], times_ms["whole"]))
        regions = len(executable.executable.schedule.computes)
        print(
            f"  {label}: {regions} regions, {took_ms:.3f} ms ({ratio:.3f}), {peaks[label]:.0f} MiB",
            flush=True,
        )


def backward_ms(
    executables: Mapping[str, _Backward], saved: Sequence[Tensor], device: torch.device, rows: int
) -> dict[str, list[float]]:
    """Of each variant its rows."""
    runs = {
        label: partial(run_row, lambda executable=executable: executable([*saved]), device, _IN_A_ROW)
        for label, executable in executables.items()
    }
    found = rows_in_turn(runs, _WARM_UP_S, rows)
    return {label: [row.step_ms for row in mine] for label, mine in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--rows", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for name in arguments.models.split(","):
        measure(name, arguments.rows)


if __name__ == "__main__":
    main()
