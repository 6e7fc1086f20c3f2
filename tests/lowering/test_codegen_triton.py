"""Triton kernels without a GPU: each is compiled for one that is not there, and run in Triton's
interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.compile_core.ir.loops import Load, Store
from gradsplit.compile_core.lowering.nests.order_axes import simplify
from gradsplit.compile_core.lowering.tiling.tiling_triton import tile_for_gpu
from gradsplit.compile_core.lowering.triton_kernels import build_triton, triton_compiler
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for, write_module
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from gradsplit.compile_core.lowering.triton_kernels.triton_compiler import import_function
from tests.lowering.codegen_nests import (
    HAND_WRITTEN,
    Case,
    NestBuilder,
    bias_gelu,
    channel_variances,
    column_sums,
    columns_of_parts,
    gated_sums_across,
    layer_norm,
    layer_norm_across,
    layer_norm_backward,
    norm_weight_gradients,
    residual_add,
    scaled_columns,
    softmax,
    total,
    transpose,
    transposed_parts,
    transposed_sums,
    turned_pairs,
    words_and_bias,
)
from tests.lowering.codegen_operations import OPERATIONS
from tests.lowering.run_interpreted import check_interpreted

SM_90 = ("cuda", 90, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_nests_compile(name: str, folder: Path) -> None:
    kernel = compile_triton_for(generate_triton(*HAND_WRITTEN[name]), SM_90, folder)
    assert kernel.asm["ptx"]


@pytest.mark.parametrize("name", list(HAND_WRITTEN)[:4])
def test_a_kernel_for_another_gpu_of_a_kind_is_the_same_entry(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of a host compiles, and the others load."""
    nest, buffers = HAND_WRITTEN[name]
    first, second = (
        generate_triton(
            nest,
            {buffer: replace(spec, device=torch.device("cuda", index)) for buffer, spec in buffers.items()},
        )
        for index in (0, 1)
    )
    compile_triton_for(first, SM_90, folder)
    monkeypatch.setattr(build_triton._workers, "ask", None)
    assert second.device.index == 1
    assert compile_triton_for(second, SM_90, folder).asm["ptx"]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "int64" not in name])
def test_scalar_operations_compile(name: str, folder: Path) -> None:
    assert compile_triton_for(generate_triton(*OPERATIONS[name][1]), SM_90, folder)


@pytest.mark.parametrize("case", [softmax(2, 70001), bias_gelu(3, 70001)], ids=["softmax", "bias_gelu"])
def test_aligned_rows_of_odd_length_are_read_16_bytes_at_a_time(case: Case, folder: Path) -> None:
    nest, buffers = case
    body = [
        replace(s, access=replace(s.access, strides=(70008, 1)))
        if isinstance(s, Load | Store) and all(s.access.strides)
        else s
        for s in nest.body
    ]
    ptx = compile_triton_for(generate_triton(replace(nest, body=tuple(body)), buffers), SM_90, folder).asm[
        "ptx"
    ]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


def test_one_instruction_rounds_to_bfloat16(folder: Path) -> None:
    """And none where a store does it."""
    counts = []
    for read_again in (False, True):
        b = NestBuilder((4096,))
        b.buffer("x", (4096,), torch.bfloat16)
        b.buffer("y", (4096,), torch.bfloat16)
        value = b.apply("exp", b.load("x", (0,)))
        rounded = b.apply("round_to", value, parameter=torch.bfloat16)
        b.store("y", (0,), b.apply("sub", value, rounded) if read_again else rounded)
        kernel = compile_triton_for(generate_triton(b.nest("rounded"), b.buffers), SM_90, folder)
        counts.append(len(re.findall(r"cvt.rn.bf16x2.f32 \S+ \S+ 0f00000000", kernel.asm["ptx"])))
    assert counts == [0, 4]


def test_without_alignment_it_compiles_too(folder: Path) -> None:
    source = generate_triton(*residual_add((64, 64)))
    assert "ld.global.v4" in compile_triton_for(source, SM_90, folder, is_aligned=True).asm["ptx"]
    assert "ld.global.v4" not in compile_triton_for(source, SM_90, folder, is_aligned=False).asm["ptx"]


def test_powers_and_reciprocal_roots_need_no_library(folder: Path) -> None:
    """LLVM would read all of libdevice, which takes as long as a fifth of a kernel, and leave a string of its own."""
    b = NestBuilder((4096,))
    b.buffer("x", (4096,), torch.float32)
    for position, operation in enumerate(("exp", "exp2", "rsqrt", "sigmoid", "tanh", "erf")):
        b.buffer(f"y{position}", (4096,), torch.float32)
        b.store(f"y{position}", (0,), b.apply(operation, b.load("x", (0,))))
    ptx = compile_triton_for(generate_triton(b.nest("powers"), b.buffers), SM_90, folder).asm["ptx"]
    assert "ex2.approx.ftz.f32" in ptx and "rsqrt.approx.ftz.f32" in ptx
    assert ".b8 _$_str" not in ptx


def test_neighbours_share_their_random_bits(folder: Path) -> None:
    """Two words cost one block, and stay in the thread that made them."""
    counts = []
    for offset in (0, 1):
        source = generate_triton(*words_and_bias(512, 512, offset))
        kernel = compile_triton_for(source, SM_90, folder)
        assert kernel.metadata.shared == 0
        counts.append(kernel.asm["ptx"].count("mul.wide.u32"))
    assert counts[0] <= 0.7 * counts[1]


@pytest.mark.multi_process
def test_they_run_in_the_interpreter() -> None:
    check_interpreted("interpreted_triton")


def test_a_missing_triton_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compiler, "triton", None)
    with pytest.raises(CompileError, match="needs Triton, which is not installed"):
        compile_triton_for(generate_triton(*residual_add((2, 3))), SM_90, folder)


def test_a_kernel_that_triton_refuses_names_its_source(folder: Path) -> None:
    source = generate_triton(*residual_add((5, 3)))
    broken = type(source)(
        **{**vars(source), "text": source.text.replace("tl.load", "tl.lode"), "name": "broken"}
    )
    with pytest.raises(CompileError, match=r"the kernel broken: (.|\n)*The source is in (.*)\.py") as raised:
        compile_triton_for(broken, SM_90, folder)
    kept = Path(str(raised.value).rsplit("source is in ", 1)[1].rstrip("."))
    assert "tl.lode" in kept.read_text()
    assert import_function(kept, "gs_broken").arg_names, "it stands by itself"


def test_of_a_kernel_nothing_but_itself_is_kept(folder: Path) -> None:
    """Neither what Triton makes on the way to it nor the functions that all kernels call."""
    source = generate_triton(*softmax(3, 7))
    before = set(folder.glob("entries/*"))
    compile_triton_for(source, SM_90, folder, is_aligned=False)
    (entry,) = set(folder.glob("entries/*")) - before
    assert {path.suffix for path in entry.iterdir()} == {".cubin", ".json", ".ptx", ".py"}
    assert (entry / "kernel.py").read_text() == source.text.replace(KERNEL_SYMBOL, "gs_softmax_1") + "\n"


@pytest.mark.multi_process
def test_a_process_that_compiles_reads_triton_once(tmp_path: Path) -> None:
    """Its own files, to name an entry of a cache, not at all, and what all kernels call with the first of them."""
    pytest.importorskip("triton")
    sources = [generate_triton(*case) for case in (softmax(3, 7), layer_norm(3, 7))]
    requests = []
    for number, source in enumerate(sources):
        place = tmp_path / str(number)
        place.mkdir()
        name = write_module(source, place / "whole.py")
        (place / "kernel.py").write_text(source.text.replace(KERNEL_SYMBOL, name))
        request = {"module": f"{place}/kernel.py", "function": name, "pointers": source.pointers}
        request |= {"is_aligned": True, "target": SM_90, "options": dict(source.meta), "folder": str(place)}
        requests.append(json.dumps({"kernels": [request]}))
    command = [sys.executable, "-c", _COUNTED, triton_compiler.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in requests:
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == {"answers": [{"error": None}]}
        process.stdin.close()
        opened = json.loads(process.stdout.readline())
    # By this project and by Triton.
    assert opened == {"codegen_triton_prelude.py.in": 2}


# Runs the script of the compile processes, and prints which of some files it opened, and how often.
_COUNTED = """
import collections, json, os, runpy, sys
opened = collections.Counter()
answers = os.dup(1)
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith((".py.in", "libtriton.so")):
        opened[os.path.basename(arguments[0])] += 1
path = sys.argv.pop()
sys.addaudithook(note)
runpy.run_path(path, run_name="__main__")
os.write(answers, json.dumps(opened).encode())
"""


def test_tiles_follow_the_shape() -> None:
    def tiling(case):
        return tile_for_gpu(simplify(case[0]))

    assert tiling(layer_norm(4096, 1024)).persistent
    assert tiling(layer_norm(4096, 1024)).r_block == 1024
    assert tiling(layer_norm(4096, 1024)).num_warps == 1
    assert tiling(layer_norm(64, 1024)).num_warps == 4  # few programs
    assert tiling(softmax(4096, 1024)).num_warps == 1
    several = tiling(layer_norm(16_384, 64))
    assert (several.x_block, several.num_warps) == (8, 1)
    assert tiling(softmax(100_000, 24)).num_warps == 4  # many rows in a program
    assert not tiling(softmax(64, 200_000)).persistent
    columns = tiling(column_sums(4096, 768))
    assert (columns.persistent, columns.x_block) == (False, 32)
    assert tiling(norm_weight_gradients(8192, 768)).x_block == 32
    assert tiling(columns_of_parts(16, 768, 512)).y_axes == (0,)
    assert tiling(columns_of_parts(16, 769, 512)).y_axes == ()
    ahead = tiling(columns_of_parts(128, 128, 512))
    assert (ahead.x_block, ahead.r_block, ahead.blocks_in_flight) == (64, 16, 3)
    assert tiling(columns_of_parts(64, 128, 512)).blocks_in_flight == 1  # few programs
    both = tiling(transposed_sums(8192, 768))
    assert both.x_block == 32 and both.r_block >= 32
    assert tiling(scaled_columns(16_384, 64)).x_block == 2048
    assert tiling(residual_add((4096, 512))).x_block == 1024
    across = tiling(layer_norm_across(32, 196, 768))
    assert (across.persistent, across.x_block, across.y_axes) == (True, 16, (0,))
    across = tiling(gated_sums_across(32, 196, 768))
    assert (across.persistent, across.x_block, across.r_block) == (False, 16, 128)
    assert tiling(layer_norm_across(32, 4, 768)).x_block == 1  # four rows side by side fill no sector
    few = tiling(channel_variances(128, 1024))
    assert (few.persistent, few.x_block) == (True, 8)
    assert tiling(transpose(512, 512)).y_axes
    assert not tiling(residual_add((512, 512))).y_axes
    # Blocks end where rows do, on the side that allows it.
    parts = tiling(transposed_parts(512, 96, 49))
    assert (parts.x_axes, parts.y_axes, parts.x_block, parts.y_block) == ((2,), (0, 1), 32, 32)
    assert tiling(transposed_parts(512, 97, 64)).y_axes == (1,)
    pairs = tiling(turned_pairs(1024, 32))
    assert (pairs.x_axes, pairs.y_axes, pairs.x_block) == ((1, 2), (0,), 32)
    assert tiling(total((10, 7))).persistent


def test_loads_wait_for_no_reduction() -> None:
    text = generate_triton(*layer_norm_backward(512, 768)).text
    assert text.rindex("tl.load") < text.index("tl.sum")


def test_addresses_beyond_int32_are_int64() -> None:
    b = NestBuilder((3, 2**30))
    b.buffer("x", (3, 2**30), torch.int8)
    b.store("x", (0, 1), b.load("x", (0, 1)))
    assert "int64" in generate_triton(b.nest("large"), b.buffers).text
    assert "int64" not in generate_triton(*residual_add((64, 64))).text


def test_kernels_of_one_text_and_other_dtypes_are_other_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of int32 and one of int64 have the same text: their types are those of the pointers."""
    sources = [generate_triton(*OPERATIONS[f"trunc_{dtype}"][1]) for dtype in ("int32", "int64")]
    assert sources[0].text == sources[1].text
    made: list[tuple[str, ...]] = []

    def launcher(source: KernelSource, *_: object) -> Callable[..., None]:
        made.append(source.pointers)
        return lambda *buffers: None

    monkeypatch.setattr(build_triton, "_launcher", launcher)
    monkeypatch.setattr(build_triton, "gpu_target", lambda device: SM_90)
    functions = build_triton.start_triton(sources, folder)()
    assert len(made) == 2 and functions["trunc_int32"] is not functions["trunc_int64"]


def test_kernels_compile_in_other_processes_and_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict] = []
    ask = build_triton._workers.ask

    def counting(request: dict) -> dict:
        asked.append(request)
        return ask(request)

    monkeypatch.setattr(build_triton._workers, "ask", counting)
    source = generate_triton(*softmax(16, 48))
    first = compile_triton_for(source, SM_90, tmp_path)
    again = compile_triton_for(replace(source, name="called_otherwise"), SM_90, tmp_path)
    assert len(asked) == 1 and first.kernel == again.kernel
    (cubin,) = tmp_path.glob("entries/*/*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:-1])
    rebuilt = compile_triton_for(source, SM_90, tmp_path).kernel
    assert len(rebuilt) == len(first.kernel)
    assert len(asked) == 2
    compile_triton_for(source, SM_90, tmp_path, is_aligned=False)
    assert len(asked) == 3
