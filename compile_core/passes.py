"""The passes between the stages, in order: each row is a plain function from a graph to a graph of the same type.

A row says when it applies; ``run_passes`` times each pass, verifies what it made if the compilation is verified, and
writes it into the compilation's text folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.fx import GraphModule

from gradsplit.compile_core.autograd.captured_graphs.fold_batch_norms import fold_batch_norms
from gradsplit.compile_core.autograd.captured_graphs.grouped_heads import group_heads
from gradsplit.compile_core.autograd.captured_graphs.joined_linears import join_linears
from gradsplit.compile_core.autograd.captured_graphs.known_masks import simplify_masks
from gradsplit.compile_core.autograd.captured_graphs.mask_rows import put_masks_in_rows
from gradsplit.compile_core.autograd.captured_graphs.masked_stores import choose_by_masks
from gradsplit.compile_core.autograd.captured_graphs.open_probabilities import draw_uniform
from gradsplit.compile_core.autograd.rewrites.absent_gradients import keep_absent_apart
from gradsplit.compile_core.autograd.rewrites.chunk_rows import chunk_rows
from gradsplit.compile_core.autograd.rewrites.fold_parameters import fold_parameters
from gradsplit.compile_core.autograd.rewrites.pack_weights import pack_weights
from gradsplit.compile_core.autograd.rewrites.pad_products import pad_products
from gradsplit.compile_core.autograd.rewrites.random_to_counters import random_to_counters
from gradsplit.compile_core.autograd.rewrites.unread_arguments import leave_unread_out
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.print_graph import print_graph, print_joint
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.ir.verify_graphs import verify_joint
from gradsplit.compile_core.ir.verify_loops import verify_program
from gradsplit.compile_core.lowering.attention.place_attention import place_attention
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.fusion.join_columns import join_column_sums
from gradsplit.compile_core.lowering.fusion.overwrite_inputs import overwrite_inputs
from gradsplit.compile_core.lowering.products.choose_gemm import choose_gemm
from gradsplit.compile_core.lowering.products.choose_products import RunSteps, choose_products
from gradsplit.compile_core.lowering.products.gemm_speed import gemm_speed
from gradsplit.compile_core.lowering.tiling.tiling_split import split_reductions
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.options import CompileOptions

Graph = TypeVar("Graph", GraphModule, JointGraph, LoopProgram)
Choices = TypeVar("Choices")


@dataclass(frozen=True)
class GraphChoices:
    """What decides how the graphs of a compilation are rewritten.

    Attributes:
        makes_random_numbers: regions draw their own random numbers, which need not be torch's.
        pads_products: the sides of matrix products are padded to what tensor cores take.
        chunk_bytes: of how many bytes of a product a loss is computed at a time; 0 for all of them.
        held: positions of the inputs that stay as they are between calls.
        packs_weights: those among them that are weights may get a layout that only torch's own kernels know.
    """

    makes_random_numbers: bool
    pads_products: bool
    chunk_bytes: int = 0
    held: frozenset[int] = frozenset()
    packs_weights: bool = False


@dataclass(frozen=True)
class RegionChoices:
    """What decides how the loops of one region are rewritten.

    Attributes:
        compute: the region that the loops are of.
        run_steps: makes a program callable, to time it.
    """

    compute: Compute
    options: CompileOptions
    run_steps: RunSteps


@dataclass(frozen=True)
class Pass(Generic[Graph, Choices]):
    """One row.

    Attributes:
        run: the graph after the pass; it may be the same object, changed.
        when: whether the pass applies to a compilation at all.
    """

    name: str
    run: Callable[[Graph, Choices], Graph]
    when: Callable[[Choices], bool] = lambda choices: True


# Before stage 2, on the graph of torch's functions.
CAPTURED_PASSES: Sequence[Pass[GraphModule, GraphChoices]] = (
    Pass("open_probabilities", lambda module, choices: draw_uniform(module)),
    Pass("masked_stores", lambda module, choices: choose_by_masks(module)),
    Pass("joined_linears", lambda module, choices: join_linears(module)),
    Pass("known_masks", lambda module, choices: simplify_masks(module, not choices.makes_random_numbers)),
    Pass("grouped_heads", lambda module, choices: group_heads(module, not choices.makes_random_numbers)),
    Pass("mask_rows", lambda module, choices: put_masks_in_rows(module, not choices.makes_random_numbers)),
    Pass(
        "fold_batch_norms",
        lambda module, choices: fold_batch_norms(module, choices.held),
        when=lambda choices: bool(choices.held),
    ),
)

# After stage 2, on forward and backward together.
JOINT_PASSES: Sequence[Pass[JointGraph, GraphChoices]] = (
    Pass("absent_gradients", lambda joint, choices: keep_absent_apart(joint)),
    Pass("unread_arguments", lambda joint, choices: leave_unread_out(joint)),
    Pass(
        "random_to_counters",
        lambda joint, choices: random_to_counters(joint),
        when=lambda choices: choices.makes_random_numbers,
    ),
    Pass(
        "pad_products",
        lambda joint, choices: pad_products(joint, torch.get_float32_matmul_precision() != "highest"),
        when=lambda choices: choices.pads_products,
    ),
    # Chunks of padded products are padded.
    Pass(
        "chunk_rows",
        lambda joint, choices: chunk_rows(joint, choices.chunk_bytes),
        when=lambda choices: choices.chunk_bytes > 0,
    ),
    Pass(
        "pack_weights",
        lambda joint, choices: pack_weights(joint, choices.held),
        when=lambda choices: choices.packs_weights and bool(choices.held),
    ),
    # After all that may compute something of parameters.
    Pass(
        "fold_parameters",
        lambda joint, choices: fold_parameters(joint, choices.held),
        when=lambda choices: bool(choices.held),
    ),
)

# After stage 5's lowering, on the loops of one region.
LOOP_PASSES: Sequence[Pass[LoopProgram, RegionChoices]] = (
    Pass(
        "choose_gemm",
        lambda program, region: choose_gemm(program, partial(gemm_speed, region.options.cache_folder)),
    ),
    Pass("fuse", lambda program, region: fuse(program)),
    Pass("join_column_sums", lambda program, region: join_column_sums(program)),
    Pass("split_reductions", lambda program, region: split_reductions(program)),
    Pass(
        "choose_products",
        lambda program, region: choose_products(
            program, region.options.cache_folder, region.options.epilogue_fusion, region.run_steps
        ),
        when=lambda region: region.options.max_autotune,
    ),
    Pass("overwrite_inputs", lambda program, region: overwrite_inputs(program, region.compute)),
    Pass("batch_nests", lambda program, region: batch_nests(program)),
    # Its kernels take nothing over from other steps, nor these from them.
    Pass("place_attention", lambda program, region: place_attention(program, _precision())),
)


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def run_passes(
    passes: Sequence[Pass[Graph, Choices]],
    graph: Graph,
    choices: Choices,
    dump: StageDump,
    prefix: str,
    options: CompileOptions,
) -> Graph:
    """The graph after all passes that apply, but for those that the user leaves out.

    Args:
        prefix: of the names that ``dump`` gives the graphs: ``<prefix>.<pass>``.

    Raises:
        InternalError: the compilation is verified, and a pass broke a rule of its graphs.
    """
    for each in passes:
        if each.name in options.skipped_passes or not each.when(choices):
            continue
        with timed(each.name) as seconds:
            graph = each.run(graph, choices)
        dump(f"{prefix}.{each.name}", _print, graph, seconds=seconds[-1])
        if options.verify:
            _verify(graph)
    return graph


def _print(graph: GraphModule | JointGraph | LoopProgram) -> str:
    if isinstance(graph, LoopProgram):
        return print_program(graph)
    if isinstance(graph, JointGraph):
        return print_joint(graph)
    return print_graph(graph)


def _verify(graph: GraphModule | JointGraph | LoopProgram) -> None:
    if isinstance(graph, LoopProgram):
        verify_program(graph)
    elif isinstance(graph, JointGraph):
        verify_joint(graph)
