"""Calls of attention on a GPU become generated kernels.

The graphs that a call holds, of changed scores and of the mask, are lowered as any graph, over scores that lie nowhere:
what comes out is one body over all of them, which the kernels execute on the tiles that they compute. A call stays one
of torch's kernels, with all scores in memory, where a body would need more than a tile of them, or where sizes, dtypes
or devices are none of a kernel's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.attention_calls import AttentionCall
from gradsplit.compile_core.ir.flex_attention import BLOCK_LISTS
from gradsplit.compile_core.ir.loops import (
    AttentionNest,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    Reduce,
    ScoreBody,
    View,
)
from gradsplit.compile_core.ir.step_effects import reads, writes
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.attention.attention_tiles import (
    MOST_ELEMENTS,
    AttentionSizes,
    attention_tile,
)
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower_into
from gradsplit.compile_core.lowering.graph_to_loops.lower_builder import ProgramBuilder
from gradsplit.compile_core.lowering.graph_to_loops.lower_index import Index
from gradsplit.compile_core.lowering.graph_to_loops.lower_values import Emitter
from gradsplit.compile_core.lowering.tiling.tiling_triton import LARGEST_INT32

logger = logging.getLogger(__name__)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES = (torch.int32, torch.int64)
_SHARED_BYTES = 227 << 10


def place_attention(program: LoopProgram, precision: str) -> LoopProgram:
    """The program with kernels in the place of its calls of attention.

    Args:
        precision: of products of float32, ``"ieee"`` or ``"tf32"``.
    """
    if not any(_attention_of(step) for step in program.steps):
        return program
    builder = ProgramBuilder()
    for name in (*program.buffers, *(s.name for s in program.steps if not isinstance(s, ExternCall))):
        builder.unique_name(name)
    builder.buffers.update(program.buffers)
    builder.constants.update(program.constants)
    for step in program.steps:
        call = _attention_of(step)
        if call is None or not isinstance(step, ExternCall):
            builder.steps.append(step)
            continue
        before = len(builder.steps)
        try:
            nests = _Placement(builder, call, step, precision).nests()
        except Unsupported as reason:
            logger.info("all scores of %s are in memory: %s", call, reason.explanation)
            del builder.steps[before:]
            nests = [step]
        builder.steps += nests
    return replace(program, buffers=builder.buffers, constants=builder.constants, steps=tuple(builder.steps))


def _attention_of(step: object) -> AttentionCall | None:
    return step.target if isinstance(step, ExternCall) and isinstance(step.target, AttentionCall) else None


class _Placement:
    """The kernels of one call."""

    def __init__(
        self, builder: ProgramBuilder, call: AttentionCall, step: ExternCall, precision: str
    ) -> None:
        self.builder = builder
        self.call = call
        self.step = step
        self.precision = precision
        (views,) = step.arguments
        operands, lists, self.score_reads, self.mask_reads = call.split(views)
        self.operands = tuple(operands)
        self.lists = dict(zip(call.options.lists, lists, strict=True))
        query, key, _ = operands[:3]
        self.shape = (*query.shape[:3], key.shape[2])
        self.device = builder.buffers[query.buffer].device

    def nests(self) -> list[AttentionNest | ExternCall]:
        """One for a forward, two for a backward.

        Raises:
            Unsupported: there is no kernel for the call.
        """
        self._check_operands()
        body = self._body()
        results = [self._result(name) for name in self.step.outputs]
        if self.call.part == "forward":
            return [self._nest("forward", body, results, BLOCK_LISTS[:4])]
        parts = [
            ("query_gradient", results[:1], BLOCK_LISTS[:4]),
            ("key_gradients", results[1:], BLOCK_LISTS[4:]),
        ]
        return [self._nest(part, body, given, names) for part, given, names in parts if any(given)]

    def _check_operands(self) -> None:
        query = self.operands[0]
        dtype = self.builder.buffers[query.buffer].dtype
        widest = max(view.shape[-1] for view in self.operands[:3])
        _require(self.device.type == "cuda", "it is not on a GPU")
        _require(dtype in _DTYPES, f"there are no kernels for {dtype}")
        _require(0 not in (*self.shape, query.shape[3], self.operands[2].shape[3]), "there are no scores")
        _require(widest <= MOST_ELEMENTS, f"rows have {widest} elements")
        results = (view for view in map(self._result, self.step.outputs) if view is not None)
        for view in (*self.operands, *self.lists.values(), *results):
            spec = self.builder.buffers[view.buffer]
            _require(spec.device == self.device, f"{view.buffer} is on another device")
            reach = sum((n - 1) * abs(s) for n, s in zip(view.shape[2:], view.stride[2:], strict=True))
            _require(reach <= LARGEST_INT32, f"{view.buffer} is too large")
        for name, view in self.lists.items():
            _require(self.builder.buffers[view.buffer].dtype in _INDEX_DTYPES, f"{name} is no list")
            fits = all(size in (1, whole) for size, whole in zip(view.shape[:2], self.shape[:2], strict=True))
            _require(fits, f"{name} is for other heads")

    def _body(self) -> ScoreBody:
        builder, call = self.builder, self.call
        spec = TensorSpec.contiguous(self.shape, torch.float32, self.device)
        unreal = [builder.new_buffer(name, spec) for name in ("scores", "arriving")]
        in_memory = [builder.in_memory(view, view.stride, view.buffer) for view in unreal]
        score_reads, mask_reads = (
            [builder.in_memory(view, view.stride, view.buffer) for view in views]
            for views in (self.score_reads, self.mask_reads)
        )
        before = len(builder.steps)
        changed = lower_into(
            builder,
            call.scores,
            [in_memory[0], *score_reads, *(in_memory[1:] if call.part == "backward" else [])],
        )
        (kept,) = lower_into(builder, call.mask, mask_reads)
        numbers: list[int] = []

        def emit(emitter: Emitter, index: Index) -> None:
            values = [emitter.cast(emitter.broadcast(value, index), torch.float32) for value in changed]
            numbers[:] = [emitter.element(kept, index), *values]

        emitter, cuts = builder.emit_over(self.shape, range(4), emit)
        names = {view.buffer for view in unreal}
        touched = frozenset[str]().union(*(reads(step) | writes(step) for step in builder.steps[before:]))
        _require(not touched & names, "more than one score at a time is needed")
        statements = tuple(emitter.statements)
        _require(not any(isinstance(s, Reduce) for s in statements), "scores are summed")
        read = {s.access.buffer for s in statements if isinstance(s, Load)}
        _require(all(builder.buffers[name].device == self.device for name in read), "a tensor is elsewhere")
        nest = LoopNest(
            builder.unique_name(f"{call}_scores"), emitter.extents, 0, statements, self.step.origins
        )
        axes = tuple(len(cuts[dim]) for dim in range(4))
        return ScoreBody(nest, axes, unreal[0].buffer, unreal[1].buffer, *numbers)  # type: ignore[arg-type]

    def _result(self, name: str | None) -> View | None:
        if name is None:
            return None
        spec = self.builder.buffers[name]
        return View(name, spec.shape, spec.stride)

    def _nest(
        self, part: str, body: ScoreBody, results: Sequence[View | None], names: Sequence[str]
    ) -> AttentionNest:
        lists = tuple(self.lists[name] for name in names if name in self.lists)
        _require(len(lists) in (2, 4), "the block mask has no lists for it")
        queries, keys = self.shape[2:]
        stays = part != "key_gradients"
        block, length = (self.call.options.block_sizes[not stays], self.shape[2:][not stays])
        _require(lists[0].shape[2] * block >= length, "the block mask is smaller")
        blocks = self.call.options.block_sizes
        dtype = self.builder.buffers[self.operands[0].buffer].dtype
        elements = (self.operands[0].shape[3], self.operands[2].shape[3])
        sizes = AttentionSizes(dtype, elements, (queries, keys), blocks, _shared_bytes(self.device))
        tile = attention_tile(part, sizes)
        if tile is None:
            raise Unsupported("attention-kernel", f"there are no tiles for {sizes}")
        programs = prod(self.shape[:2]) * max(-(-queries // tile.queries), -(-keys // tile.keys))
        _require(programs <= LARGEST_INT32, "there are too many tiles")
        return AttentionNest(
            self.builder.unique_name(f"{self.call}_{part}"), part, self.operands, lists, blocks, tuple(results), body,
            self.call.options.scale, tile, self.precision, self.step.origins,
        )  # fmt: skip


def _shared_bytes(device: torch.device) -> int:
    """What a program on a GPU may have; on one that is not there as on an H100."""
    if not torch.cuda.is_available():
        return _SHARED_BYTES
    # ROCm does not say.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise Unsupported("attention-kernel", reason)
