"""Chooses a library for each float32 matrix product on the CPU.

Products come from the lowering as ``aten.mm.out`` or ``aten.addmm.out``, which is BLAS. One that oneDNN does faster
becomes a call of oneDNN's operator. That operator has no ``out=``: its result is a buffer of its own; where the product
was to be written elsewhere, or multiplied with a number, a nest stores it there, and fusion may join that nest with
others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gradsplit.compile_core.ir.loops import (
    Access,
    Apply,
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    Statement,
    Step,
    Store,
    View,
)
from gradsplit.compile_core.ir.step_effects import writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec, contiguous_strides
from gradsplit.compile_core.lowering.products.gemm_speed import GemmSpeed, onednn_linear

aten = torch.ops.aten


def choose_gemm(program: LoopProgram, measure: Callable[[], GemmSpeed | None]) -> LoopProgram:
    """The same program with products moved to oneDNN where that is faster.

    Args:
        measure: the speeds, called where there is a product to choose for; ``None`` without oneDNN.
    """
    products = {
        number: product
        for number, step in enumerate(program.steps)
        if isinstance(step, ExternCall) and (product := _product(step, program)) is not None
    }
    speed = measure() if products else None
    if speed is None:
        return program
    buffers = dict(program.buffers)
    steps: list[Step] = []
    written_by: dict[str, int] = {}
    for step in program.steps:
        for name in writes(step):
            written_by[name] = written_by.get(name, 0) + 1
    given = {*program.inputs, *program.destinations}
    for number, step in enumerate(program.steps):
        product = products.get(number)
        if product is None or not speed.prefers_onednn(*product.sizes, product.is_dense):
            steps.append(step)
            continue
        out = product.out
        whole = View(out.buffer, buffers[out.buffer].shape, buffers[out.buffer].stride)
        own = out.buffer not in given and written_by[out.buffer] == 1 and out == whole
        if own and product.factor == 1.0 and buffers[out.buffer].is_contiguous:
            steps.append(product.call(out.buffer))
            continue
        name = f"{out.buffer}_product"
        rows, _, columns = product.sizes
        buffers[name] = TensorSpec.contiguous((rows, columns), torch.float32, buffers[out.buffer].device)
        steps.append(product.call(name))
        steps.append(_store(name, out, product))
    return replace(program, buffers=buffers, steps=tuple(steps))


class _Product:
    """``factor * (left @ right) + bias``, to be written to ``out``."""

    def __init__(self, step: ExternCall, left: View, right: View, bias: View | None, factor: float) -> None:
        self.out = step.out["out"]
        self.sizes = (left.shape[0], left.shape[1], right.shape[1])
        self.factor = factor
        self.origins = step.origins
        self.is_dense = left.stride == contiguous_strides(left.shape)
        self._left, self._right, self._bias = left, right, bias

    def call(self, result: str) -> ExternCall:
        right = self._right
        transposed = View(right.buffer, right.shape[::-1], right.stride[::-1], right.offset)
        arguments = (self._left, transposed, self._bias, "none", [], "")
        return ExternCall(onednn_linear(), arguments, {}, (result,), {}, self.origins)


def _product(step: ExternCall, program: LoopProgram) -> _Product | None:
    """The product that a step computes, if oneDNN can compute it too."""
    if step.target not in (aten.mm.out, aten.addmm.out):
        return None
    views = (*step.arguments[-2:], step.out["out"])
    specs = [program.buffers[view.buffer] for view in views]
    if any(spec.dtype != torch.float32 or spec.device.type != "cpu" for spec in specs):
        return None
    if step.target is aten.mm.out:
        bias, (left, right), factor = None, step.arguments, 1.0
    else:
        bias, left, right = step.arguments
        beta, factor = step.keywords.get("beta", 1), float(step.keywords.get("alpha", 1))
        if beta == 0:
            bias = None
        elif beta != 1 or factor != 1.0 or len(bias.shape) != 1 or bias.shape[0] != right.shape[1]:
            return None
    if 0 in (*left.shape, *right.shape):
        return None
    return _Product(step, left, right, bias, factor)


def _store(source: str, out: View, product: _Product) -> LoopNest:
    rows, _, columns = product.sizes
    body: list[Statement] = [Load(Access(source, (columns, 1)), torch.float32)]
    if product.factor != 1.0:
        body += [Constant(product.factor, torch.float32), Apply("mul", (0, 1), torch.float32)]
    body.append(Store(Access(out.buffer, out.stride, out.offset), len(body) - 1))
    return LoopNest(f"{source}_stored", (rows, columns), 0, tuple(body), product.origins)
