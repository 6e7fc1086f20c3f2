"""Attention with changed scores as a GPU would get it, without one, and what it means, in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from gradsplit.compile_core.autograd import flex_attention as traced
from gradsplit.compile_core.autograd.captured_graphs.replace_calls import copy_module
from gradsplit.compile_core.backends.generated_kernels import generate_region
from gradsplit.compile_core.backends.registry import RegionBackend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.attention_calls import AttentionCall
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.ir.loops import AttentionNest, LoopProgram, Step
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph
from tests.lowering.loop_evaluator import Buffers, allocate, evaluate, run_step
from tests.lowering.move_graph import on_gpu
from tests.lowering.product_programs import on

RunKernel = Callable[[KernelSource, Sequence[torch.Tensor]], None]
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.0625])
BIAS = torch.linspace(-1, 1, 600)


def identity(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + SLOPES[h] * (j - i)


def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * torch.tanh(score / 2)


def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where(i < j, score * BIAS[j - i + 300], score.square() * 0.1) + b


def everything(b: Any, h: Any, i: Any, j: Any) -> Any:
    return noop_mask(b, h, i, j)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 20)


def some_rows(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i % 3 != 0) & (i >= j) & ((h == 0) | (j > 40))


def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


DOCUMENTS = torch.stack([torch.arange(300) // 70, torch.arange(300) // 40])


@dataclass(frozen=True)
class Case:
    """An attention to test: its functions, and sizes of queries and keys."""

    score_mod: Callable[..., Any]
    mask_mod: Callable[..., Any]
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (100, 100)
    elements: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    block: int = 128
    masks_heads: bool = False
    device: str = "cpu"

    def operands(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = [
            (self.batch, self.lengths[0], self.heads[0], self.elements[0]),
            (self.batch, self.lengths[1], self.heads[1], self.elements[0]),
            (self.batch, self.lengths[1], self.heads[1], self.elements[1]),
        ]
        made = [torch.randn(size, generator=generator).transpose(1, 2) for size in sizes]
        return [tensor.to(self.dtype).to(self.device) for tensor in made]

    @property
    def block_mask(self) -> tuple[Any, ...]:
        batch, heads = (self.batch, self.heads[0]) if self.masks_heads else (None, None)
        return create_block_mask(
            self.mask_mod, batch, heads, *self.lengths, device=self.device, BLOCK_SIZE=self.block
        ).as_tuple()

    def program(self) -> Callable[..., Any]:
        block_mask = self.block_mask

        def attend(query: Any, key: Any, value: Any) -> Any:
            result, sums, maxima = operator(query, key, value, self.score_mod, block_mask, 0.3, {})
            return result, torch.where(sums == -math.inf, 0.0, sums), maxima

        return attend

    def exact(self, query: Any, key: Any, value: Any) -> Any:
        """In float64, by plain broadcasting."""
        group = self.heads[0] // self.heads[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        sizes = (self.batch, self.heads[0], *self.lengths)
        at = [
            torch.arange(n, device=self.device).view([-1 if d == k else 1 for d in range(4)])
            for k, n in enumerate(sizes)
        ]
        scores = query @ key.mT * 0.3
        kept = self.mask_mod(*at).expand(sizes)
        changed = torch.where(kept, self.score_mod(scores, *at), -math.inf)
        is_empty = ~kept.any(-1)
        sums = torch.logsumexp(torch.where(is_empty[..., None], 0.0, changed), -1)
        weights = torch.where(is_empty[..., None], 0.0, torch.exp(changed - sums[..., None]))
        sums = torch.where(is_empty, 0.0, sums / math.log(2))
        return weights @ value, sums, changed.detach().amax(-1) / math.log(2)


@dataclass
class AttentionKernels:
    """A backend that runs kernels of attention by ``run``, and all else by the evaluator of loops."""

    run: RunKernel
    folder: Path
    sources: list[KernelSource] = field(default_factory=list)
    programs: list[LoopProgram] = field(default_factory=list)
    regions: list[Compute] = field(default_factory=list)

    def compile_region(self, compute: Compute, options: CompileOptions, dump: StageDump) -> Any:
        moved = replace(compute, module=_moved(compute.module))
        self.regions.append(moved)
        generated, sources = generate_region(moved, options, dump)
        self.programs.append(generated)
        named = {source.name: source for source in sources}
        self.sources += [named[s.name] for s in generated.steps if isinstance(s, AttentionNest)]
        program = on(torch.device("cpu"), generated)
        return lambda: (
            lambda arguments: evaluate(program, arguments, run=functools.partial(self._run_step, named))
        )

    def _run_step(
        self, sources: dict[str, KernelSource], step: Step, buffers: Buffers, program: LoopProgram
    ) -> None:
        if not isinstance(step, AttentionNest):
            return run_step(step, buffers, program)
        for name in reads(step) | writes(step):
            allocate(buffers, program, name)
        source = sources[step.name]
        return self.run(source, [buffers[name] for name in source.buffers])

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        backend = RegionBackend("attention", self.compile_region, lambda *_: decomposition_table("cuda"))
        options = CompileOptions(cache_folder=self.folder, verify=True)
        compile_with = functools.partial(compile_graph, backend=backend, options=options)
        compiled = CompiledFunction(function, compile_with, fullgraph=True)

        def call(*operands: torch.Tensor) -> Any:
            devices = traced.DEVICE_TYPES
            traced.DEVICE_TYPES = frozenset({"cpu"})
            try:
                return compiled(*operands)
            finally:
                traced.DEVICE_TYPES = devices

        return call


def no_kernel(source: KernelSource, tensors: Sequence[torch.Tensor]) -> None:
    """What the kernels would compute is not looked at."""
    for tensor in tensors:
        tensor.zero_()


def _moved(module: GraphModule) -> GraphModule:
    """The region as it would be for a GPU, with the graphs that its calls hold."""
    module = copy_module(module)
    for node in module.graph.nodes:
        call = node.target
        if isinstance(call, AttentionCall):
            inner = [on_gpu(copy_module(held)) for held in (call.scores, call.mask)]
            node.target = AttentionCall(call.part, call.options, inner[0], inner[1], call.results)
    return on_gpu(module)


CASES: dict[str, Case] = {
    "alibi": Case(alibi, causal, heads=(4, 2), batch=2, elements=(8, 24)),
    "softcap": Case(softcap, everything, lengths=(100, 257)),
    "relative": Case(relative, window, batch=2, heads=(2, 1), lengths=(150, 150), block=64),
    "empty_rows": Case(alibi, some_rows, lengths=(130, 96), block=32, masks_heads=True),
    "documents": Case(identity, same_document, batch=2, heads=(1, 1), lengths=(130, 130), masks_heads=True),
    "one_query": Case(alibi, everything, lengths=(1, 100), elements=(20, 16)),
    "half": Case(alibi, causal, lengths=(128, 128), dtype=torch.float16, elements=(32, 32)),
}
