"""The peak memory of a training step's programs on a GPU, told from when their buffers live; no GPU is needed.

    python -m tests.bench.program_memory [--model gpt2] [--chunk-mib 0,64,128,256] [--budget 1.0] [--held 5]

The models are those of ``gpu_training`` and ``sweep_models``, under bf16 autocast. The graph is captured and traced on
a CPU, whose attention is another, moved to a GPU and lowered; nothing runs. Parameters count, gradients from when the
backward has made them; workspaces of libraries and what an allocator wastes do not: GPT-2's measured peak is 0.09 GiB
more.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any

import torch

import gradsplit
from gradsplit.compile_core.autograd.captured_graphs.fake_values import note_fake_values
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.chunk_rows import chunk_rows
from gradsplit.compile_core.autograd.rewrites.pad_products import pad_products
from gradsplit.compile_core.autograd.rewrites.random_to_counters import random_to_counters
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.ir.graphs import JointGraph, PartitionedGraph
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.tiling.tiling_split import split_reductions
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.passes import CAPTURED_PASSES, GraphChoices, run_passes
from gradsplit.compile_core.runtime.take_memory import memory_to_take
from tests.bench.gpu_training import MODELS as TUNED
from tests.bench.sweep_models import MODELS as SWEPT
from tests.lowering.move_graph import on_gpu

_GIB = 2**30
MODELS = {**SWEPT, **TUNED}


class _CapturedError(Exception):
    """Ends the call once its graph is known."""


def capture(name: str) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The captured graph of a model's step, and its fake inputs."""
    seen: list[Any] = []

    def note(module: torch.fx.GraphModule, examples: Any) -> Any:
        seen.append((module, list(examples)))
        raise _CapturedError

    model, inputs = MODELS[name]()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            gradsplit.compile(model, backend=note)(**inputs)
    except _CapturedError:
        pass
    return seen[-1]


@dataclass(frozen=True)
class Peak:
    """The most that lies in memory at once: GiB, and the buffers with the step, largest first."""

    gib: float
    step: str
    held: list[tuple[str, TensorSpec]]


def traced(module: torch.fx.GraphModule, examples: list[Any], chunk_bytes: int) -> JointGraph:
    """A captured graph with its backward, as for a GPU."""
    module = copy.deepcopy(module)
    note_fake_values(module, examples)
    choices = GraphChoices(makes_random_numbers=True, pads_products=True)
    dump = StageDump(None, None)
    program = run_passes(CAPTURED_PASSES, module, choices, dump, "captured", CompileOptions())
    with torch.autocast("cpu", torch.bfloat16), timed("trace_joint"):
        decompositions = {**decomposition_table("cpu"), **random_decompositions.DECOMPOSITIONS}
        joint = trace_joint(program, examples, decompositions)
    with timed("joint_passes"):
        joint = chunk_rows(pad_products(random_to_counters(joint), True, "cpu"), chunk_bytes)
    on_gpu(joint.module)
    return joint


def schedules(graph: PartitionedGraph) -> dict[str, Schedule]:
    """The forward and the backward, one region each."""
    assert graph.backward is not None
    return {
        "forward": whole_schedule("forward", graph.forward, {}, graph.num_outputs),
        "backward": whole_schedule("backward", graph.backward),
    }


def peaks(
    module: torch.fx.GraphModule, examples: list[Any], chunk_bytes: int, budget: float
) -> dict[str, Peak]:
    """Those of the forward and of the backward."""
    joint = traced(module, examples, chunk_bytes)
    graph = partition(joint, budget)
    given = [node for node in joint.module.graph.find_nodes(op="placeholder") if node.name in joint.primals]
    given_bytes = sum(node.meta["val"].nbytes for node in given)
    return {
        part: _peak(*_loops(schedule), set(joint.primals), given_bytes)
        for part, schedule in schedules(graph).items()
    }


def _loops(schedule: Schedule) -> tuple[LoopProgram, tuple[str, ...]]:
    """A schedule of one region as loops, and the names of its inputs."""
    (compute,) = schedule.computes
    return batch_nests(split_reductions(join_column_sums(fuse(lower(compute))))), compute.inputs


def _peak(program: LoopProgram, inputs: tuple[str, ...], primals: set[str], given_bytes: int) -> Peak:
    """Of a program, whose graph's own inputs take ``given_bytes`` throughout."""
    buffers = program.buffers
    lent = {
        buffer for buffer, name in zip(program.inputs, inputs, strict=True) if name in primals
    } | program.constants.keys()
    ends: dict[str, int] = {}
    for number, step in enumerate(program.steps):
        ends.update(dict.fromkeys(reads(step) | writes(step), number))
    ends.update({view.buffer: len(program.steps) for view in program.outputs if view is not None})
    live = {name for name in program.inputs if name in ends} - lent
    peak = Peak(0.0, "", [])
    for number, step in enumerate(program.steps):
        made = writes(step) - lent - live
        read_last = sorted(name for name in live if ends[name] == number)
        is_call = isinstance(step, ExternCall)
        taken = {} if is_call else memory_to_take(step, sorted(made), read_last, buffers)
        live = (live | made) - {old for (old, *_) in taken.values()}
        gib = (given_bytes + sum(buffers[name].bytes for name in live)) / _GIB
        if gib > peak.gib:
            largest = sorted(live, key=lambda name: -buffers[name].bytes)
            what = str(step.target) if isinstance(step, ExternCall) else step.name
            peak = Peak(gib, what, [(name, buffers[name]) for name in largest])
        live = {name for name in live if ends[name] > number}
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    parser.add_argument("--chunk-mib", default="0,64,128,256")
    parser.add_argument("--held", type=int, default=0, help="how many of the largest buffers to print")
    parser.add_argument("--budget", type=float, default=1.0, help="activation_memory_budget")
    arguments = parser.parse_args()
    module, examples = capture(arguments.model)
    for mib in map(int, arguments.chunk_mib.split(",")):
        for part, peak in peaks(module, examples, mib << 20, arguments.budget).items():
            print(f"chunks of {mib} MiB, {part}: {peak.gib:.2f} GiB at {peak.step}", flush=True)
            for name, spec in peak.held[: arguments.held]:
                print(f"    {spec.bytes >> 20} MiB {name} {spec.dtype} {spec.shape}")


if __name__ == "__main__":
    main()
