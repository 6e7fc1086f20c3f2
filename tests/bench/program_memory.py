"""The peak memory of a training step's programs on a GPU, told from when their buffers live; no GPU is needed.

    python -m tests.bench.program_memory [--model gpt2] [--chunk-mib 0,64,128,256] [--budget 1.0]

The models are those of ``gpu_training``, under bf16 autocast. The graph is captured and traced on a CPU, moved to a GPU
and lowered; nothing runs. Parameters count, gradients from when the backward has made them; workspaces of libraries and
what an allocator wastes do not: GPT-2's measured peak is 0.09 GiB more.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch

import gradsplit
from gradsplit.compile_core.autograd.captured_graphs.fake_values import note_fake_values
from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.chunk_rows import chunk_rows
from gradsplit.compile_core.autograd.rewrites.pad_products import pad_products
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.regions import whole_schedule
from gradsplit.compile_core.ir.schedule import Schedule
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.tiling.tiling_split import split_reductions
from gradsplit.compile_core.passes import CAPTURED_PASSES, GraphChoices
from tests.bench.gpu_training import MODELS
from tests.lowering.move_graph import on_gpu

_GIB = 2**30


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


def peaks(
    module: torch.fx.GraphModule, examples: list[Any], chunk_bytes: int, budget: float
) -> tuple[float, float]:
    """GiB in the forward and in the backward."""
    module = copy.deepcopy(module)
    note_fake_values(module, examples)
    for row in CAPTURED_PASSES:
        module = row.run(module, GraphChoices(makes_random_numbers=True, pads_products=True))
    with torch.autocast("cpu", torch.bfloat16):
        joint = trace_joint(module, examples, decomposition_table("cpu"))
    joint = chunk_rows(pad_products(joint, True, "cpu"), chunk_bytes)
    graph = partition(joint, budget)
    assert graph.backward is not None
    given = [node for node in joint.module.graph.find_nodes(op="placeholder") if node.name in joint.primals]
    given_bytes = sum(node.meta["val"].nbytes for node in given)
    found = []
    for part, module in (("forward", graph.forward), ("backward", graph.backward)):
        on_gpu(module)
        schedule = (
            whole_schedule(part, module, {}, graph.num_outputs)
            if part == "forward"
            else whole_schedule(part, module)
        )
        found.append((given_bytes + _peak(*_loops(schedule), set(joint.primals))) / _GIB)
    return found[0], found[1]


def _loops(schedule: Schedule) -> tuple[LoopProgram, tuple[str, ...]]:
    """A schedule of one region as loops, and the names of its inputs."""
    (compute,) = schedule.computes
    return batch_nests(split_reductions(join_column_sums(fuse(lower(compute))))), compute.inputs


def _peak(program: LoopProgram, inputs: tuple[str, ...], primals: set[str]) -> int:
    """The most bytes that lie in memory at a step, without those of the graph's own inputs."""
    lent = {
        buffer for buffer, name in zip(program.inputs, inputs, strict=True) if name in primals
    } | program.constants.keys()
    ends: dict[str, int] = {}
    for number, step in enumerate(program.steps):
        ends.update(dict.fromkeys(reads(step) | writes(step), number))
    ends.update({view.buffer: len(program.steps) for view in program.outputs if view is not None})
    live = {name for name in program.inputs if name in ends} - lent
    most = 0
    for number, step in enumerate(program.steps):
        live |= writes(step) - lent
        most = max(most, sum(program.buffers[name].bytes for name in live))
        live = {name for name in live if ends[name] > number}
    return most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    parser.add_argument("--chunk-mib", default="0,64,128,256")
    parser.add_argument("--budget", type=float, default=1.0, help="activation_memory_budget")
    arguments = parser.parse_args()
    module, examples = capture(arguments.model)
    for mib in map(int, arguments.chunk_mib.split(",")):
        forward, backward = peaks(module, examples, mib << 20, arguments.budget)
        print(f"chunks of {mib} MiB: forward {forward:.2f} GiB, backward {backward:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
