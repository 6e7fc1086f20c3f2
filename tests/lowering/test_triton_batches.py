"""Nests that are alike as one Triton kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gradsplit.compile_core.ir.loops import ExternCall
from gradsplit.compile_core.lowering.build import build, generate
from gradsplit.compile_core.lowering.fusion.batch_nests import batch_nests
from gradsplit.compile_core.lowering.fusion.fuse import fuse
from gradsplit.compile_core.lowering.graph_to_loops.lower import lower
from gradsplit.compile_core.lowering.triton_kernels.build_triton import compile_triton_for
from gradsplit.compile_core.runtime.link_program import link_program
from gradsplit.compile_core.runtime.region_interpreter import region_interpreter
from tests.lowering.batch_programs import PROGRAMS, batch_program, batches, casts, momentum_in_place
from tests.lowering.lowering_harness import compare, compute_of, trace
from tests.lowering.product_programs import on
from tests.lowering.run_interpreted import check_interpreted

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_which_nests_are_a_batch(name: str) -> None:
    assert sorted(len(batch.members) for batch in batches(batch_program(name))) == PROGRAMS[name][2]


def test_they_compute_in_the_interpreter() -> None:
    check_interpreted("interpreted_batches")


@pytest.mark.parametrize("name", ["casts", "casts_of_whole_blocks"])
def test_a_kernel_sees_that_all_members_are_aligned(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = batch_program(name)
    aligned = [batch for batch in batches(program) if len(batch.members) == 3]
    assembly = compile_triton_for(generate(aligned[0], program.buffers), ("cuda", 90, 32), tmp_path).asm[
        "ptx"
    ]
    assert "ld.global.v4" in assembly or "ld.global.b128" in assembly or "ld.global.v2.b64" in assembly


def test_a_kernel_jumps_to_its_member(tmp_path: Path) -> None:
    """Else all pointers were loaded, and chosen among, by each program: 592 microseconds where 96 kernels took 246."""
    pytest.importorskip("triton")
    xs = [torch.randn(16 * (k + 1)) for k in range(40)]
    program = batch_nests(on(GPU, lower(compute_of(trace(lambda xs: torch.ops.aten._foreach_exp(xs), xs)))))
    assembly = compile_triton_for(generate(program.steps[0], program.buffers), ("cuda", 90, 32), tmp_path).asm
    assert assembly["ptx"].count("bra") > 40


def test_a_kernel_is_no_longer_for_more_members(tmp_path: Path) -> None:
    """It reads the pointers of its member from where its arguments lie; a branch for each took 2 ms to compile."""
    pytest.importorskip("triton")
    lengths = []
    for count in (40, 60):
        xs = [torch.randn(256) for _ in range(count)]
        program = batch_nests(on(GPU, lower(compute_of(trace(casts, xs)))))
        kernel = compile_triton_for(generate(program.steps[0], program.buffers), ("cuda", 90, 32), tmp_path)
        lengths.append(kernel.asm["ptx"].partition("{\n")[2].count("\n"))
        assert "ld.global.v4" in kernel.asm["ptx"]
        assert f"{kernel.metadata.name}_param_{2 * count - 1}" in kernel.asm["ptx"]
    assert lengths[0] == lengths[1]


def test_how_many_members_there_are_makes_no_other_kernel() -> None:
    sources = []
    for count in (2, 11):
        xs = [torch.randn(256) for _ in range(count)]
        program = batch_nests(on(GPU, lower(compute_of(trace(casts, xs)))))
        sources.append(generate(program.steps[0], program.buffers))
    assert sources[0].text == sources[1].text and sources[0].pointers == sources[1].pointers
    assert [source.grid[0] for source in sources] == [4, 22]
    assert [len(set(source.buffers)) for source in sources] == [4, 22]


def test_a_kernel_of_addresses_that_are_not_aligned_reads_one_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = batch_program("casts_of_whole_blocks")
    source = generate(batches(program)[0], program.buffers)
    text = compile_triton_for(source, ("cuda", 90, 32), tmp_path, is_aligned=False).asm["ptx"]
    assert "ld.param.b64" in text and "ld.global.v4" not in text and "ld.global.v2" not in text


def test_what_begins_within_a_buffer_is_passed_as_far_as_it_is_aligned() -> None:
    """A kernel takes for aligned what it is given."""
    program = batch_program("parts")
    source = generate(batches(program)[0], program.buffers)
    assert source.bases[:6] == (0, 0, 64, 0, 128, 0)
    program = batch_program("scaled")
    source = generate(batches(program)[0], program.buffers)
    assert not any(source.bases) and "rest" in source.text


def test_parts_of_one_buffer_are_as_many_arguments() -> None:
    tables = [torch.randn(8000) for _ in range(3)]
    xs = [torch.randn(16 * (k + 1)) for k in range(120)]

    def function(tables: list[torch.Tensor], xs: list[torch.Tensor]) -> list[torch.Tensor]:
        one, two, three = tables
        return [
            x * one[len(x) : 2 * len(x)] + two[len(x) : 2 * len(x)] * three[len(x) : 2 * len(x)] for x in xs
        ]

    program = batch_nests(on(GPU, fuse(lower(compute_of(trace(function, tables, xs))))))
    assert [len(batch.members) for batch in batches(program)] == [96, 24]
    assert [len(generate(batch, program.buffers).buffers) for batch in batches(program)] == [480, 120]


def test_the_order_of_members_makes_no_other_kernel() -> None:
    """Layer by layer weights come in the same sizes, and where a batch begins among them differs."""
    sources = []
    for sizes in ((1024, 4096, 1024, 2048), (2048, 1024, 1024, 4096)):
        xs = [torch.randn(size) for size in sizes]
        lowered = lower(compute_of(trace(lambda xs: torch.ops.aten._foreach_exp(xs), xs)))
        program = batch_nests(on(GPU, lowered))
        (batch,) = batches(program)
        sources.append(generate(batch, program.buffers))
    assert sources[0].text == sources[1].text
    assert len(set(sources[0].buffers)) == 8 and sources[0].buffers != sources[1].buffers


def test_a_kernel_takes_so_many_pointers() -> None:
    xs = [torch.randn(16) for _ in range(300)]
    lowered = lower(compute_of(trace(lambda xs: torch.ops.aten._foreach_exp(xs), xs)))
    program = batch_nests(on(GPU, lowered))
    assert [len(batch.members) for batch in batches(program)] == [128, 128, 44]


def test_an_optimizer_needs_no_copies_on_a_gpu() -> None:
    program = momentum_in_place(*[(16, k + 1) for k in range(200)])
    assert [len(batch.members) for batch in batches(program)] == [85, 85, 30]  # of three pointers each
    assert len(program.steps) == 3 and len(program.overwritten) == 400


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_batch_on_a_gpu(name: str, tmp_path: Path) -> None:
    function, inputs, _ = PROGRAMS[name]
    program = batch_program(name)
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    run = link_program(program, sources, build(sources, tmp_path))
    flat = [tensor.to(GPU) for tensor in tree_leaves(inputs)]
    results = [result.cpu() for result in run([*flat])]
    compare(results, tree_leaves(function(*inputs)))


@pytest.mark.gpu
def test_kernels_need_nothing_of_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be compiled C, which takes up to a second: once, and for every number of arguments."""
    import triton

    if region_interpreter() is None:
        pytest.skip("regions run in Python here")
    monkeypatch.setattr(type(triton.runtime.driver), "active", None)
    program = batch_program("casts")
    sources = [generate(step, program.buffers) for step in program.steps if not isinstance(step, ExternCall)]
    named = [
        replace(source, text=f"{source.text}\n    # {tmp_path}") for source in sources
    ]  # built here only
    run = link_program(program, named, build(named, tmp_path))
    flat = [tensor.to(GPU) for tensor in tree_leaves(PROGRAMS["casts"][1])]
    compare([result.cpu() for result in run([*flat])], [tensor.cpu().to(torch.bfloat16) for tensor in flat])
