"""Loop nests to sources, and sources to callables, whichever language they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.kernels import BuiltKernel, KernelSource, StartedBuild
from gradsplit.compile_core.ir.loops import AttentionNest, BandNest, GeneratedStep, NestBatch, ProductNest
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.cpp_kernels.build_cpp import start_cpp
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import generate_cpp
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp_batch import generate_cpp_batch
from gradsplit.compile_core.lowering.nests.kernel_bases import rebased
from gradsplit.compile_core.lowering.nests.passes import buffers_of
from gradsplit.compile_core.lowering.triton_kernels.build_triton import start_triton
from gradsplit.compile_core.lowering.triton_kernels.codegen_attention import generate_attention
from gradsplit.compile_core.lowering.triton_kernels.codegen_bands import generate_bands
from gradsplit.compile_core.lowering.triton_kernels.codegen_product import generate_product
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton_batch import generate_triton_batch


def start_build(
    sources: Sequence[KernelSource], cache_folder: Path, most_threads: int | None = None
) -> StartedBuild:
    """Starts to compile the kernels of a program, in the background.

    Args:
        sources: kernels with distinct names.
        cache_folder: where results are kept; processes may share it.
        most_threads: that find kernels in the cache or wait for what compiles them.

    Raises:
        CompileError: a compiler is missing or failed; from here or when the kernels are waited for.
    """
    cpp = [source for source in sources if source.language == "cpp"]
    on_gpu = [source for source in sources if source.language == "triton"]
    started = (start_cpp(cpp, cache_folder), start_triton(on_gpu, cache_folder, most_threads))
    return StartedBuild(
        [future for part in started for future in part.compiling],
        lambda: {name: kernel for part in started for name, kernel in part().items()},
    )


def build(sources: Sequence[KernelSource], cache_folder: Path) -> Mapping[str, BuiltKernel]:
    """``start_build``, and waits."""
    return start_build(sources, cache_folder)()


def generate(step: GeneratedStep, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """Source for the device that a nest's buffers are on; of a product or an attention, a GPU.

    Raises:
        Unsupported: the buffers are on several devices or on one without code generation, or a dtype is not
        handled.
    """
    if isinstance(step, ProductNest):
        return generate_product(step, buffers)
    if isinstance(step, AttentionNest):
        return generate_attention(step, buffers)
    nests = (
        step.members if isinstance(step, NestBatch) else [step.rows if isinstance(step, BandNest) else step]
    )
    devices = {buffers[name].device for nest in nests for name in buffers_of(nest)}
    kinds = {device.type for device in devices}
    if len(devices) == 1 and kinds <= {"cpu", "cuda"}:
        on_cpu = kinds == {"cpu"}
        if isinstance(step, NestBatch):
            return (generate_cpp_batch if on_cpu else generate_triton_batch)(step, buffers)
        if isinstance(step, BandNest):
            rows, bases = rebased(step.rows, buffers)
            source = generate_bands(replace(step, rows=rows), buffers)
        else:
            nest, bases = rebased(step, buffers, all_aligned=not on_cpu)
            source = generate_cpp(nest, buffers) if on_cpu else generate_triton(nest, buffers)
        return replace(source, bases=tuple(bases.get(name, 0) for name in source.buffers))
    named = ", ".join(sorted(map(str, devices)))
    raise Unsupported(
        "kernel-devices",
        f"The kernel {step.name} has buffers on: {named}",
        "Move the tensors to one CPU or GPU.",
    )
