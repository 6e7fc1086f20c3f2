"""Passes of Triton's that have nothing to do for a kernel, left out: each takes a look at it, and checks it again.

Triton runs the same passes over every kernel. A third of them is about what few kernels of ours have: matrix products
and how their factors are brought near, loops whose loads are started ahead, functions that are called. Which of them a
kernel has is looked up in what it is before the first of these passes; the machine code is the same without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Operations -> modules of Triton's native part -> what adds a pass that is only about such operations.
_ONLY_FOR: Mapping[tuple[str, ...], Mapping[str, Sequence[str]]] = {
    ("tt.dot", "tt.descriptor"): {
        "passes.ttgpuir": (
            *("add_f32_dot_tc", "add_accelerate_matmul", "add_optimize_dot_operands", "add_prefetch"),
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
        "nvidia.passes.hopper": ("add_hopper_warpspec",),
    },
    ("tt.call",): {"passes.gluon": ("add_inliner",)},
}


def leave_out(stages: dict[str, Any], native: ModuleType) -> None:
    """Changes the stages of a kernel for an NVIDIA GPU.

    Args:
        native: ``libtriton``.
    """
    if "cubin" not in stages:
        return
    unneeded: list[tuple[ModuleType, str]] = []
    to_gpu, to_llvm = stages["ttgir"], stages["llir"]

    def first(module: Any, metadata: Any) -> Any:
        unneeded.extend(_unneeded(str(module), native))
        with _without(unneeded):
            return to_gpu(module, metadata)

    def second(module: Any, metadata: Any) -> Any:
        with _without(unneeded):
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
def _without(functions: Sequence[tuple[ModuleType, str]]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name in functions]
    for module, name in functions:
        setattr(module, name, _nothing)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _nothing(*_: Any) -> None:
    """Adds no pass."""
