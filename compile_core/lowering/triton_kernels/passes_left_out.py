"""Passes of Triton's that have nothing to do for a kernel, left out: each takes a look at it, and checks it again.

Triton runs the same passes over every kernel. Half of them are about what few kernels of ours have: matrix products and
how their factors are brought near, loops whose loads are started ahead, branches, functions that are called. Which of
them a kernel has is looked up in what it is before the first of these passes. Without the passes between them some
would follow themselves, and find nothing left to do. The machine code is the same without all these, but for the order
of some instructions in two of nine hundred kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Operations -> modules of Triton's native part -> what adds a pass that is only about such operations.
_ONLY_FOR: Mapping[tuple[str, ...], Mapping[str, Sequence[str]]] = {
    ("tt.dot", "tt.descriptor"): {
        "passes.ttgpuir": (
            *("add_f32_dot_tc", "add_accelerate_matmul", "add_optimize_dot_operands", "add_prefetch"),
            "add_reduce_data_duplication",
        ),
        "nvidia.passes.ttnvgpuir": (
            *("add_optimize_descriptor_encoding", "add_tma_lowering", "add_lower_mma", "add_fence_insertion"),
            *("add_optimize_tmem_layouts", "add_interleave_tmem", "add_allocate_tensor_memory"),
            *("add_check_matmul_two_cta", "add_proxy_fence_insertion"),
        ),
    },
    ("scf.for", "scf.while"): {
        "passes.ttgpuir": (
            *("add_fuse_nested_loops", "add_assign_latencies", "add_schedule_loops", "add_pipeline"),
            "add_coalesce_async_copy",
        ),
        "passes.ttir": ("add_triton_licm",),
        "nvidia.passes.hopper": ("add_hopper_warpspec",),
        "nvidia.passes.ttnvgpuir": ("add_warp_specialize_to_llvm",),
    },
    ("scf.for", "scf.while", "tt.reshape", "tt.gather"): {
        "passes.ttgpuir": ("add_optimize_thread_locality",),
    },
    ("scf.for", "scf.while", "scf.if", "cf."): {
        "passes.ttgpuir": ("add_combine_tensor_select_and_if",),
        "passes.convert": ("add_scf_to_cf",),
        "passes.common": ("add_sccp",),
    },
    ("tt.call",): {"passes.gluon": ("add_inliner",), "passes.common": ("add_symbol_dce",)},
}
# What goes on until nothing changes any more, and leaves the others of these next to nothing.
_SETTLING = ("add_canonicalizer", "add_cse", "add_loop_aware_cse", "add_remove_layout_conversions")


def leave_out(stages: dict[str, Any], native: ModuleType) -> None:
    """Changes the stages of a kernel for an NVIDIA GPU.

    Args:
        native: ``libtriton``.
    """
    if "cubin" not in stages:
        return
    unneeded: set[tuple[ModuleType, str]] = set()
    to_gpu, to_llvm = stages["ttgir"], stages["llir"]

    def first(module: Any, metadata: Any) -> Any:
        unneeded.update(_unneeded(str(module), native))
        with _without(unneeded, native):
            return to_gpu(module, metadata)

    def second(module: Any, metadata: Any) -> Any:
        with _without(unneeded, native):
            return to_llvm(module, metadata)

    stages["ttgir"], stages["llir"] = first, second


def _unneeded(kernel: str, native: ModuleType) -> Iterator[tuple[ModuleType, str]]:
    """The functions that add passes which are about nothing in a kernel, as far as this release of Triton has them."""
    for operations, modules in _ONLY_FOR.items():
        if any(operation in kernel for operation in operations):
            continue
        for path, names in modules.items():
            module: Any = native
            for part in path.split("."):
                module = getattr(module, part, None)
            yield from ((module, name) for name in names if hasattr(module, name))


@contextmanager
def _without(unneeded: Set[tuple[ModuleType, str]], native: ModuleType) -> Iterator[None]:
    """Inside, what adds one of these passes adds nothing, nor what adds a settling one once more before any other."""
    settled: set[str] = set()

    def adding(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def add(*arguments: Any) -> None:
            if name in settled:
                return
            if name not in _SETTLING:
                settled.clear()
            else:
                settled.add(name)
            function(*arguments)

        return add

    before = [(module, name, getattr(module, name)) for module, name in _adding(native)]
    for module, name, function in before:
        setattr(module, name, _nothing if (module, name) in unneeded else adding(name, function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _adding(native: ModuleType) -> Iterator[tuple[ModuleType, str]]:
    """The functions that add passes."""
    for group in (native.passes, native.nvidia.passes):
        for module in vars(group).values():
            if isinstance(module, ModuleType):
                yield from ((module, name) for name in vars(module) if name.startswith("add_"))


def _nothing(*_: Any) -> None:
    """Adds no pass."""
