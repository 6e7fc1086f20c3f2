"""Each row of the tables of passes: a small graph that it changes, before and after; both keep their graphs' rules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradsplit
from gradsplit.compile_core import passes
from gradsplit.compile_core.autograd.captured_graphs import grouped_heads as heads
from gradsplit.compile_core.autograd.captured_graphs import joined_linears as linears
from gradsplit.compile_core.autograd.captured_graphs import mask_rows as masks
from gradsplit.compile_core.autograd.rewrites import pack_weights as packing
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.ir.graphs import JointGraph
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.ir.print_graph import print_graph, print_joint
from gradsplit.compile_core.ir.print_loops import print_program
from gradsplit.compile_core.ir.schedule import Compute
from gradsplit.compile_core.lowering.decompositions.decomposition_table import decomposition_table
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.products import choose_products
from gradsplit.compile_core.lowering.products.choose_gemm import choose_gemm
from gradsplit.compile_core.lowering.products.gemm_speed import GemmSpeed, gemm_speed
from gradsplit.compile_core.observe.dump import StageDump
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.passes import CAPTURED_PASSES, JOINT_PASSES, LOOP_PASSES, RegionChoices
from tests.autograd.compare_with_eager import captured, fakes
from tests.lowering.attention_programs import AttentionKernels, Case, causal, no_kernel, softcap
from tests.lowering.band_programs import norm_backward
from tests.lowering.lowering_harness import compute_of, trace
from tests.lowering.move_graph import on_gpu
from tests.lowering.product_programs import TILE, on

GPU = torch.device("cuda", 0)
GRAPHS = passes.GraphChoices(makes_random_numbers=True, pads_products=True)


def region(compute: Compute) -> RegionChoices:
    return RegionChoices(compute, CompileOptions(max_autotune=True), lambda program: lambda inputs: None)


def joint_of(program: Callable[..., Any], *inputs: Tensor) -> JointGraph:
    return trace_joint(captured(program), fakes(inputs), random_decompositions.DECOMPOSITIONS)


def loops_of(program: Callable[..., Any], *inputs: Tensor) -> tuple[LoopProgram, RegionChoices]:
    compute = compute_of(trace(program, *inputs))
    return lower(compute), region(compute)


def fused_for_gpu(program: Callable[..., Any], *inputs: Tensor) -> tuple[LoopProgram, RegionChoices]:
    loops, choices = loops_of(program, *inputs)
    return fuse(on(GPU, loops)), choices


def masked_stores() -> Any:
    def store(x: Tensor, mask: Tensor, row: Tensor) -> Tensor:
        x = x + 1
        x[mask] = row
        return x

    row = torch.ones(4, requires_grad=True)
    return captured_in(store, (torch.ones(3, 4), torch.ones(3, dtype=torch.bool), row)), GRAPHS


def joined_linears() -> Any:
    def gated(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, gate).relu() * F.linear(x, up, bias)

    weights = [torch.ones(8, 4, requires_grad=True), torch.ones(8, 4, requires_grad=True)]
    return captured_in(gated, (torch.ones(3, 4), *weights, torch.ones(8))), GRAPHS


def known_masks() -> Any:
    def attend(query: Tensor) -> Tensor:
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    return captured_in(attend, (torch.ones(1, 1, 3, 4),)), GRAPHS


def grouped_heads() -> Any:
    def attend(query: Tensor, key: Tensor) -> Tensor:
        key = key[:, :, None].expand(1, 1, 2, 3, 4).reshape(1, 2, 3, 4)
        return F.scaled_dot_product_attention(query, key, key)

    return captured_in(attend, (torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4))), GRAPHS


def mask_rows() -> Any:
    def attend(query: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=bias.permute(2, 0, 1))

    return captured_in(attend, (torch.ones(1, 2, 3, 4), torch.ones(3, 3, 2))), GRAPHS


def open_probabilities() -> Any:
    def drop(x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p) + torch.empty_like(x).bernoulli_(p)

    return captured_in(drop, (torch.ones(3), 0.5), (torch.ones(3), 0.25)), GRAPHS


def fold_batch_norms() -> Any:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1, bias=False), torch.nn.BatchNorm2d(3)).eval()
    with torch.no_grad():
        module = captured_in(model, (torch.ones(1, 2, 4, 4),))
    return module, replace(GRAPHS, held=frozenset(range(1, 6)))


def pack_weights() -> Any:
    image = torch.ones(1, 2, 4, 4).to(memory_format=torch.channels_last)
    kernel, matrix = torch.ones(3, 2, 1, 1), torch.ones(5, 3).bfloat16()

    def program(x: Tensor, kernel: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(F.conv2d(x, 2 * kernel).mean((2, 3)).bfloat16(), matrix)

    return joint_of(program, image, kernel, matrix), replace(GRAPHS, held={1, 2}, packs_weights=True)


def fold_parameters() -> Any:
    def program(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight.bfloat16().t(), weight.sin()

    return joint_of(program, torch.ones(2, 3).bfloat16(), torch.ones(4, 3)), replace(GRAPHS, held={1})


def captured_in(program: Callable[..., Any], *calls: tuple[Any, ...]) -> Any:
    """The graph that the last of these calls has captured."""
    seen: list[Any] = []

    def note(module: Any, examples: Any) -> Any:
        seen.append(module)
        return module

    compiled = gradsplit.compile(program, backend=note)
    for arguments in calls:
        compiled(*arguments)
    return seen[-1]


def absent_gradients() -> Any:
    ones = torch.ones(3, requires_grad=True)
    return joint_of(lambda a, b: (a.log(), b * a), ones, ones.detach().requires_grad_()), GRAPHS


def unread_arguments() -> Any:
    x = torch.ones(1, 4, 512, 512, requires_grad=True)
    return joint_of(lambda x: F.avg_pool2d(x.sin(), 3, 2, 1), x), GRAPHS


def random_to_counters() -> Any:
    return joint_of(lambda a: torch.dropout(a, 0.5, True), torch.ones(3, requires_grad=True)), GRAPHS


def pad_products() -> Any:
    matrices = torch.ones(512, 513).bfloat16(), torch.ones(513, 512).bfloat16()
    joint = joint_of(lambda a, b: a @ b, *matrices)
    return replace(joint, module=on_gpu(joint.module)), GRAPHS


def chunk_rows() -> Any:
    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight.t(), labels)

    x, weight = (torch.ones(shape, requires_grad=True) for shape in ((6, 1), (5, 1)))
    program = trace_joint(
        captured(loss), fakes([x, weight, torch.zeros(6, dtype=torch.int64)]), decomposition_table("cpu")
    )
    return program, replace(GRAPHS, chunk_bytes=2 * 5 * 4)


def overwrite_inputs() -> Any:
    compute = compute_of(trace(lambda a, b: a + b, torch.ones(4), torch.ones(4)))
    compute = replace(compute, replaced={compute.outputs[0]: compute.inputs[0]})
    return fuse(lower(compute)), region(compute)


def place_attention() -> tuple[LoopProgram, RegionChoices]:
    case = Case(softcap, causal, lengths=(20, 30), block=16)
    with tempfile.TemporaryDirectory() as folder:
        kernels = AttentionKernels(no_kernel, Path(folder))
        kernels.compiled(case.program())(*case.operands())
    compute = kernels.regions[0]
    return fuse(lower(compute)), region(compute)


EXAMPLES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "open_probabilities": open_probabilities,
    "masked_stores": masked_stores,
    "joined_linears": joined_linears,
    "known_masks": known_masks,
    "grouped_heads": grouped_heads,
    "mask_rows": mask_rows,
    "fold_batch_norms": fold_batch_norms,
    "absent_gradients": absent_gradients,
    "unread_arguments": unread_arguments,
    "random_to_counters": random_to_counters,
    "pad_products": pad_products,
    "chunk_rows": chunk_rows,
    "pack_weights": pack_weights,
    "fold_parameters": fold_parameters,
    "choose_gemm": lambda: loops_of(torch.mm, torch.ones(4, 5), torch.ones(5, 6)),
    "fuse": lambda: loops_of(lambda a, b: ((a * b).sum(1), a.sin()), torch.ones(4, 5), torch.ones(4, 5)),
    "join_column_sums": lambda: (on(GPU, norm_backward()), None),
    "split_reductions": lambda: fused_for_gpu(lambda a: a.sum(), torch.ones(1 << 20)),
    "choose_products": lambda: fused_for_gpu(
        lambda a, b: F.relu(a @ b), torch.ones(64, 48), torch.ones(48, 32)
    ),
    "overwrite_inputs": overwrite_inputs,
    "batch_nests": lambda: loops_of(lambda *tensors: [2 * t for t in tensors], *map(torch.ones, (3, 4, 5))),
    "place_attention": place_attention,
}


def test_every_pass_has_an_example() -> None:
    assert [row.name for row in (*CAPTURED_PASSES, *JOINT_PASSES, *LOOP_PASSES)] == list(EXAMPLES)


def shown(graph: Any) -> str:
    if isinstance(graph, LoopProgram):
        return print_program(graph)
    return print_joint(graph) if isinstance(graph, JointGraph) else print_graph(graph)


@pytest.mark.parametrize("row", [*CAPTURED_PASSES, *JOINT_PASSES, *LOOP_PASSES], ids=lambda row: row.name)
def test_before_and_after(
    row: Any, golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is faster on the machine that runs this is not the question.
    monkeypatch.setattr(passes, "gemm_speed", lambda folder: GemmSpeed(1, 1, 0, 0, 0))
    monkeypatch.setattr(linears, "gain", lambda *given: True)
    monkeypatch.setattr(heads, "takes_groups", lambda *given: True)
    monkeypatch.setattr(masks, "takes_mask", lambda attention: attention.attn_mask.stride(-1) == 1)
    monkeypatch.setattr(packing, "has_bfloat16_kernels", lambda: True)
    monkeypatch.setattr(choose_products, "_tile_for", lambda *arguments: TILE)
    torch.set_float32_matmul_precision("highest")
    graph, choices = EXAMPLES[row.name]()
    before = shown(graph)
    after = shown(
        passes.run_passes([row], graph, choices, StageDump(tmp_path), "graph", CompileOptions(verify=True))
    )
    assert after != before
    (written,) = tmp_path.iterdir()
    assert written.name.endswith(f".graph.{row.name}.txt") and written.read_text() == after
    golden(f"passes/{row.name}.txt", f"{before}\n--- {row.name}\n\n{after}")


def test_copies_and_noise_keep_a_product_with_blas() -> None:
    speed = GemmSpeed(0, 1.0, 0, 0.9, onednn_copy_s=2.0)
    assert speed.prefers_onednn(8, 8, 8) and not speed.prefers_onednn(8, 8, 8, is_dense=False)
    assert speed.prefers_onednn(8, 8, 80, is_dense=False)
    assert not GemmSpeed(0, 1.0, 0, 0.97, 0).prefers_onednn(8, 8, 8)


def test_no_speed_is_measured_where_no_product_of_the_cpu_is() -> None:
    def measure() -> GemmSpeed:
        raise AssertionError

    inputs = (torch.ones(4, 5), torch.ones(5, 6))
    for program in (fused_for_gpu(torch.mm, *inputs)[0], loops_of(torch.add, inputs[0], inputs[0])[0]):
        assert choose_gemm(program, measure) is program
    with pytest.raises(AssertionError):
        choose_gemm(loops_of(torch.mm, *inputs)[0], measure)


def test_the_speed_of_products_is_measured_whatever_a_program_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in (torch.float64, torch.bfloat16):
        monkeypatch.setattr(torch, "get_num_threads", lambda setting=setting: setting.itemsize)
        before = torch.get_default_dtype()
        torch.set_default_dtype(setting)
        try:
            speed = gemm_speed(tmp_path)
        finally:
            torch.set_default_dtype(before)
        assert speed is None or min(speed.blas_call_s, speed.onednn_call_s) > 0
