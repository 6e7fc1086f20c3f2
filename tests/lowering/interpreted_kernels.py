"""Generated Triton kernels in Triton's interpreter, on CPU tensors.

The interpreter is chosen by the environment variable ``TRITON_INTERPRET`` before Triton is imported, so what uses this
runs in a process of its own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.lowering.triton_kernels.build_triton import write_module
from gradsplit.compile_core.lowering.triton_kernels.triton_compiler import import_function, triton
from gradsplit.compile_core.runtime.link_program import LinkedProgram, link_program
from gradsplit.compile_core.toolchain.disk_cache import content_key
from tests.lowering.product_programs import on

ROOT = Path(__file__).parents[2]


def run_interpreted(*arguments: str) -> str:
    """Runs Python with these arguments in a process that has the interpreter; returns what it prints."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


def jit_function(source: KernelSource, folder: Path) -> Any:
    """Imports the kernel from a module that it writes into ``folder``."""
    path = folder / content_key(source.name, source.text) / "kernel.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    function = import_function(path, write_module(source, path))
    function.fn.__globals__["libdevice"] = _Libdevice()
    interpreter = triton.runtime.interpreter
    interpreter.InterpreterBuilder.create_fma = _fused_multiply_add
    interpreter._convert_float = _converted
    interpreter.ReduceOps.generic_reduce = _reduced
    interpreter.InterpretedFunction.__call__ = _call_device_function
    _let_numbers_bound_loops()
    # Overflow is asserted in debug mode only, and otherwise computed for nothing.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    return function


def interpreted(source: KernelSource, folder: Path) -> Callable[..., None]:
    """A function of the kernel's buffers that runs it."""
    kernel = jit_function(source, folder)[source.grid]
    bases = source.bases or (0,) * len(source.buffers)

    def launch(*tensors: torch.Tensor) -> None:
        if 0 in source.grid:
            return
        memory = [_Memory(tensor, base) for tensor, base in zip(tensors, bases, strict=True)]
        # numpy plays the GPU here, and would warn of infinities and NaN that IEEE arithmetic defines.
        with numpy.errstate(all="ignore"):
            kernel(*(buffer.seen for buffer in memory))
        for buffer in memory:
            buffer.finish()

    return launch


def link_interpreted(program: LoopProgram, sources: Sequence[KernelSource], folder: Path) -> LinkedProgram:
    """A program for a GPU, as one that runs on CPU tensors."""
    kernels = {source.name: interpreted(source, folder) for source in sources}
    whole = [replace(source, bases=()) for source in sources]
    return link_program(on(torch.device("cpu"), program), whole, kernels)


class _Memory:
    """What a kernel sees of a tensor, from an element on, which may lie before the tensor's memory."""

    def __init__(self, tensor: torch.Tensor, base: int) -> None:
        # The interpreter has no booleans in memory; bytes are what the kernel's source takes them for.
        tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        self._whole = torch.as_strided(
            tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
        )
        start = tensor.storage_offset() + base
        self._lead = max(0, -start)
        longer = torch.cat([self._whole.new_zeros(self._lead), self._whole]) if self._lead else self._whole
        self.seen = longer[start + self._lead :]

    def finish(self) -> None:
        if self._lead:
            self._whole.copy_(self.seen[-len(self._whole) :])


def _fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """One rounding, as on a GPU; the interpreter's own has two, which exponentials see."""
    exact = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
    return triton.runtime.interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype)


def _reduced(reduction: Any, tensors: Sequence[Any]) -> list[Any]:
    """Joins whole slices in their order; the interpreter's own joins one number after the other."""
    assert reduction.keep_dims

    def slices(place: int) -> list[Any]:
        parts = (numpy.take(tensor.handle.data, [place], reduction.axis) for tensor in tensors)
        return [reduction.to_tensor(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    joined = slices(0)
    for place in range(1, tensors[0].shape[reduction.axis]):
        result = reduction.combine_fn.fn(*joined, *slices(place))
        joined = list(result) if isinstance(result, tuple) else [result]
    return joined


def _call_device_function(function: Any, *arguments: Any, **named: Any) -> Any:
    """The interpreter's own patches Triton's language before each call, and leaves it so."""
    _patch_language_for(function.fn)
    return function.rewrite()(*arguments, **named)


@functools.cache
def _let_numbers_bound_loops() -> None:
    """The interpreter's scalars are arrays of one element, which NumPy no longer takes for numbers."""
    interpreter = triton.runtime.interpreter
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched


@functools.cache
def _patch_language_for(function: Callable[..., Any]) -> None:
    triton.runtime.interpreter._patch_lang(function)


def _converted(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Between float32 and bfloat16, to the nearest; the interpreter's own cuts off, and loses the smallest numbers."""
    values = torch.from_numpy(bits.copy()).view(torch.bfloat16 if source.is_bf16() else torch.float32)
    result = values.to(torch.bfloat16 if target.is_bf16() else torch.float32)
    return result.view(torch.uint16 if target.is_bf16() else torch.float32).numpy()


class _Libdevice:
    """The functions of libdevice, which the interpreter lacks, by torch's of the same names."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            arrays = [torch.from_numpy(argument.handle.data) for argument in arguments]
            result = getattr(torch, name)(*arrays)
            handle = triton.runtime.interpreter.TensorHandle(result.numpy(), arguments[0].handle.dtype)
            scalar = arguments[0].type.scalar
            is_block = any(argument.type.is_block() for argument in arguments)
            kind = triton.language.block_type(scalar, list(result.shape)) if is_block else scalar
            return triton.language.tensor(handle, kind)

        return call
