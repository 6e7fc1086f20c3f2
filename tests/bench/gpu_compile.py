"""Where processor seconds go when a training step is compiled for a GPU; no GPU is needed.

    python -m tests.bench.gpu_compile [--models llama,vgg16] [--target 90] [--workers 2] [--slowest 5]

The models are those of ``program_memory``, captured and traced as there, each in a process of its own with an empty
cache. *python* is what this process does up to the kernels' sources, by stage; *build* is what Triton takes to compile
them, in ``--workers`` processes, with their start. What a GPU would add is not there: loading kernels, linking
programs, the two libraries of C++ that a machine builds once. With ``--slowest`` the kernels that take longest are
compiled again, one by one, and named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.backends.generated_kernels import generate_region
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.lowering.triton_kernels import build_triton
from gradsplit.compile_core.observe import stage_times
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.rare_collections import rare_collections
from tests.bench.compile_time import processor_seconds
from tests.bench.program_memory import MODELS, capture, schedules, traced

_SHOWN_S = 0.02


def sources_of(name: str, options: CompileOptions) -> list[KernelSource]:
    """The kernels of a model's step, forward and backward."""
    module, examples = capture(name)
    joint = traced(module, examples, options.chunk_bytes)
    with timed("partition"):
        graph = partition(joint, options.activation_memory_budget)
    sources = []
    for schedule in schedules(graph).values():
        (compute,) = schedule.computes
        sources += generate_region(compute, options, StageDump(None, None))[1]
    return sources


def build_seconds(sources: Sequence[KernelSource], target: int, workers: int, folder: Path) -> float:
    """What it takes to compile kernels into an empty cache."""
    start_s = processor_seconds()
    build_triton._THREADS_BESIDE_OTHERS = workers
    build_triton._workers.start(workers)  # as a compilation does before anything else
    targets = {source.device: ("cuda", target, 32) for source in sources}
    build_triton.compile_into_cache(sources, folder, targets)
    return processor_seconds() - start_s


def measure(name: str, target: int, workers: int, slowest: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    stage_times.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, rare_collections():
        sources = sources_of(name, CompileOptions(cache_folder=Path(folder)))
        stages = stage_times.total_seconds()
        build_s = build_seconds(sources, target, workers, Path(folder))
    distinct = {(source.text, source.pointers, source.meta): source for source in sources}
    python_s = sum(stages.values())
    print(f"{name}: {python_s + build_s:.2f} s: python {python_s:.2f}, build {build_s:.2f};", end=" ")
    print(f"{len(sources)} kernels, {len(distinct)} of them distinct")
    print("   ", ", ".join(f"{stage} {s:.2f}" for stage, s in stages.items() if s > _SHOWN_S), flush=True)
    if slowest:
        with tempfile.TemporaryDirectory() as folder:
            taken = [
                (build_seconds([source], target, 1, Path(folder)), source.name)
                for source in distinct.values()
            ]
        for seconds, kernel in sorted(taken, reverse=True)[:slowest]:
            print(f"    {seconds:.2f} s {kernel}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama,deberta-v2,vgg16,resnext50,regnet,convnext")
    parser.add_argument("--target", type=int, default=90, help="the GPU's architecture")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slowest", type=int, default=0)
    parser.add_argument("--child", choices=list(MODELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments.child, arguments.target, arguments.workers, arguments.slowest)
        return
    given = [f"--{name}={getattr(arguments, name)}" for name in ("target", "workers", "slowest")]
    for name in arguments.models.split(","):
        command = [sys.executable, "-m", "tests.bench.gpu_compile", *given, "--child", name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
