"""The default backend: generates Triton kernels for CUDA tensors and C++ kernels for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradsplit.compile_core.artifact_logs import log_artifact
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import ExternCall, LoopProgram
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.user_lines import user_lines
from gradsplit.compile_core.lowering.build import build, generate, start_build
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.graph_to_loops.extern_rules import fallback_calls
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.triton_kernels.build_triton import start_workers
from gradsplit.compile_core.observe.diagram import draw_program
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.passes import LOOP_PASSES, RegionChoices, run_passes
from gradsplit.compile_core.runtime.instructions import instructions_of
from gradsplit.compile_core.runtime.link_program import LinkedProgram, link_program


def prepare(device_type: str) -> None:
    """Starts what takes a while to start, before there is anything to compile.

    Raises:
        Unsupported: there are no kernels for the device.
    """
    if device_type not in ("cpu", "cuda"):
        raise Unsupported("device", f"there are kernels for cpu and cuda, not for {device_type}")
    if device_type == "cuda":
        start_workers()


def decompositions(device_type: str, options: CompileOptions) -> Mapping[Any, Callable[..., Any]]:
    """What the lowering relies on."""
    return decomposition_table(device_type, options.freezing)


def compile_region(compute: Compute, options: CompileOptions, dump: StageDump) -> Callable[[], LinkedProgram]:
    """Stages 5 to 7 for one region: loops, fusion, kernels that compile in the background, and, once these are waited
    for, the function that calls them."""
    program, sources = generate_region(compute, options, dump)
    with timed("build"):
        wait_for_kernels = start_build(sources, options.cache_folder)

    def finish() -> LinkedProgram:
        with timed("build"):
            kernels = wait_for_kernels()
        with timed("link"):
            linked = link_program(program, sources, kernels)
        if options.cuda_graphs:
            linked = replace(
                linked,
                link_again=partial(link_program, program, sources, kernels),
                instructions=partial(instructions_of, program, kernels_take_addresses=True),
            )
        dump(f"{compute.name}.program", str, linked.text)
        return linked

    return finish


def generate_region(
    compute: Compute, options: CompileOptions, dump: StageDump
) -> tuple[LoopProgram, list[KernelSource]]:
    """A region as loops that are final, and the source of each kernel."""
    with timed("lower"):
        program = lower(compute)
    choices = RegionChoices(compute, options, lambda part: _link(part, options))
    program = run_passes(LOOP_PASSES, program, choices, dump, compute.name, options)
    dump(f"{compute.name}.unfused", lambda program: "\n".join(map(str, program.unfused)), program)
    dump(f"{compute.name}.loops", print_program, program, "fusion")
    log_artifact("perf_hints", lambda: _hints(program))
    dump.diagram(f"{compute.name}.fused", lambda: draw_program(program))
    with timed("generate"):
        sources = _generate(program)
    print_sources = partial(_print_sources, compute, program)
    dump(f"{compute.name}.kernels", print_sources, sources, "output_code")
    return program, sources


def _hints(program: LoopProgram) -> str:
    lines = [f"torch's kernel runs {call.target}, which has no lowering" for call in fallback_calls(program)]
    return "\n".join([f"{program.name}:", *lines, *map(str, program.unfused)])


def _user_lines(compute: Compute, program: LoopProgram) -> dict[str, str]:
    """What stands before each kernel's text: the lines of the program that it computes."""
    nodes = {node.name: node for node in compute.module.graph.nodes}
    return {
        step.name: "".join(
            f"// {place.filename}:{place.line} {place.text}\n"
            for place in user_lines(nodes[name] for name in step.origins if name in nodes)
        )
        for step in program.steps
        if not isinstance(step, ExternCall)
    }


def _print_sources(compute: Compute, program: LoopProgram, sources: Sequence[KernelSource]) -> str:
    lines = _user_lines(compute, program)
    return "\n\n".join(f"// {source.name}\n{lines[source.name]}{source.text}" for source in sources)


def _generate(program: LoopProgram) -> list[KernelSource]:
    return [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]


def _link(program: LoopProgram, options: CompileOptions) -> LinkedProgram:
    """A program as it is, at once."""
    sources = _generate(program)
    return link_program(program, sources, build(sources, options.cache_folder))
