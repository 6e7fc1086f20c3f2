"""Kernels compiled together and without Triton's idle passes: the machine code is what each kernel has by itself."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import KernelSource
from gradsplit.compile_core.lowering.triton_kernels import build_triton, triton_compiler
from gradsplit.compile_core.lowering.triton_kernels.assembled_together import joined, without_unread
from gradsplit.compile_core.lowering.triton_kernels.build_triton import (
    compile_together,
    compile_triton_for,
)
from gradsplit.compile_core.lowering.triton_kernels.codegen_product import generate_product
from gradsplit.compile_core.lowering.triton_kernels.codegen_triton import generate_triton
from gradsplit.compile_core.lowering.triton_kernels.passes_left_out import leave_out
from tests.lowering.codegen_nests import column_sums, layer_norm, residual_add, softmax
from tests.lowering.codegen_operations import OPERATIONS
from tests.lowering.product_programs import product_program, products

SM_90 = ("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton")


def sources() -> list[KernelSource]:
    """Element by element, whole rows with shared memory, loops over blocks, a product."""
    nests = (residual_add((64, 64)), layer_norm(512, 768), softmax(64, 200_000), column_sums(4096, 768))
    program, _ = product_program("linear_gelu_bfloat16")
    (product,) = products(program)
    return [*(generate_triton(*nest) for nest in nests), generate_product(product, program.buffers)]


def code(kernel: object) -> bytes:
    """A kernel's instructions."""
    binary, name = kernel.kernel, kernel.metadata.name  # type: ignore[attr-defined]
    start = struct.unpack_from("<Q", binary, 40)[0]
    count, names = struct.unpack_from("<HH", binary, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, start + 64 * i) for i in range(count)]
    texts = binary[headers[names][4] :]
    (found,) = (h for h in headers if texts[h[0] :].startswith(f".text.{name}\0".encode()))
    return binary[found[4] : found[4] + found[5]]


def by_triton(source: KernelSource, folder: Path) -> object:
    """A kernel as Triton compiles it by itself, with all passes."""
    folder.mkdir()
    (folder / "kernel.py").write_text(build_triton._function(source))
    request = {"module": f"{folder}/kernel.py", "function": build_triton._function_name(source)}
    request |= {"pointers": source.pointers, "is_aligned": True, "target": SM_90}
    request["options"] = build_triton._options(source)
    triton_compiler.compile_into(request, folder, None)
    return triton_compiler.load_kernel(folder, source.pointers, "")


def test_machine_code_is_what_triton_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compiler.triton.knobs.compilation, "disable_line_info", True)
    together = compile_together([(source, SM_90) for source in sources()], tmp_path / "together")
    alone = [by_triton(source, tmp_path / str(number)) for number, source in enumerate(sources())]
    assert [code(kernel) for kernel in together] == [code(kernel) for kernel in alone]
    assert len({*(kernel.kernel for kernel in together)}) < len(together)


def test_what_kernels_define_for_themselves_meets_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logarithms come with a text of a library's that nothing reads, sines with a table as well."""
    monkeypatch.setattr(triton_compiler.triton.knobs.compilation, "disable_line_info", True)
    operations = ["log_float32", "log2_float32", "sin_float32", "cos_float32"]
    calling = [generate_triton(*OPERATIONS[name][1]) for name in operations]
    together = compile_together([(source, SM_90) for source in calling], tmp_path / "together")
    alone = [by_triton(source, tmp_path / str(number)) for number, source in enumerate(calling)]
    assert [code(kernel) for kernel in together] == [code(kernel) for kernel in alone]
    assert len({*(kernel.kernel for kernel in together)}) == 3
    assert "ptxas" not in "".join(capfd.readouterr())


def test_kernels_of_one_name_are_told_apart(tmp_path: Path) -> None:
    named = [replace(source, name="same") for source in sources()[:3]]
    together = compile_together([(source, SM_90) for source in named], tmp_path / "together")
    alone = [compile_triton_for(source, SM_90, tmp_path / "alone") for source in named]
    assert [code(kernel) for kernel in together] == [code(kernel) for kernel in alone]


@pytest.mark.parametrize(
    "broken", ["tl.lode", "tl.inline_asm_elementwise('no code;', '=r,r', [1], tl.int32, True, 1)"]
)
def test_a_kernel_that_fails_leaves_the_others(tmp_path: Path, broken: str) -> None:
    """Whether it is Triton or the assembler that refuses it."""
    first, second, third, *_ = sources()
    bad = replace(second, text=f"{second.text}\n    tl.store(p0, {broken})")
    results = compile_together([(first, SM_90), (bad, SM_90), (third, SM_90)], tmp_path)
    assert isinstance(results[1], CompileError) and second.name in str(results[1])
    assert code(results[0]) and code(results[2])


def test_what_processes_have_in_common_is_compiled() -> None:
    """Else each of them would do it again, and nobody would notice."""
    triton_compiler._warm_up()


def test_groups_leave_no_thread_idle() -> None:
    def sizes(count: int, threads: int) -> list[int]:
        return [len(group) for group in build_triton._groups(range(count), threads)]

    assert sizes(39, 2) == [8] * 4 + [7]
    assert sizes(200, 16) == [4] * 50
    assert sizes(5, 2) == [2, 2, 1]
    assert sizes(3, 16) == [1, 1, 1]


def test_texts_are_joined_under_one_head() -> None:
    head = ".version 8.7\n.target sm_90a\n.address_size 64\n"
    shared = ".extern .shared .align 16 .b8 global_smem[];\n"
    text = joined(
        [f"{head}.visible .entry a() {{}}\n", *(f"{head}{shared}.visible .entry {n}() {{}}\n" for n in "bc")]
    )
    assert [text.count(part) for part in (".version", ".target", ".address_size", ".extern", ".entry")] == [
        *(1, 1, 1, 1, 3)
    ]


def test_variables_that_nothing_reads_are_left_out() -> None:
    define = ".global .align 1 .b8 _$_str[2] = {95, 0};\n.const .align 4 .b8 table[4];\n"
    rest = "ld.const.b32 %r2, [table+4];  // _$_str_$_2\n"
    assert without_unread(define + rest) == define.splitlines(True)[1] + rest


def added_passes(kernel: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the passes that Triton would add for a kernel, those that it adds."""
    from triton._C import libtriton

    groups = libtriton.passes.common, libtriton.passes.ttgpuir
    modules = {name: next(group for group in groups if hasattr(group, name)) for name in names}
    added: list[str] = []
    for name, module in modules.items():
        monkeypatch.setattr(module, name, partial(added.append, name))
    whole = {name: getattr(module, name) for name, module in modules.items()}

    def stage(module: str, _metadata: object) -> str:
        for name in names:
            getattr(modules[name], name)()
        return module

    stages = {"ttgir": stage, "llir": stage, "cubin": None}
    leave_out(stages, libtriton)
    assert stages["ttgir"](kernel, {}) == kernel
    assert {name: getattr(module, name) for name, module in modules.items()} == whole
    return added


def test_passes_are_left_out_by_what_a_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["add_pipeline", "add_prefetch"]
    assert added_passes("tt.load", names, monkeypatch) == []
    assert added_passes("scf.for", names, monkeypatch) == ["add_pipeline"]
    assert added_passes("scf.for tt.dot", names, monkeypatch) == names


def test_a_pass_does_not_follow_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between them is left out, or leaves it nothing to do."""
    names = ["add_canonicalizer", "add_pipeline", "add_canonicalizer", "add_cse", "add_canonicalizer"]
    names += ["add_reorder_instructions", "add_canonicalizer"]
    expected = ["add_canonicalizer", "add_cse", "add_reorder_instructions", "add_canonicalizer"]
    assert added_passes("tt.load", names, monkeypatch) == expected
    with_pipeline = ["add_canonicalizer", "add_pipeline", *expected]
    assert added_passes("scf.for", names, monkeypatch) == with_pipeline


def test_a_quickened_front_end_says_what_is_wrong(tmp_path: Path) -> None:
    """In a function that a kernel calls, and with the line."""
    first, *_ = sources()
    bad = replace(first, text=f"{first.text}\n    tl.store(p0, nan_max(1.0, tl.arange(0, 3)))")
    (result,) = compile_together([(bad, SM_90)], tmp_path)
    assert isinstance(result, CompileError) and "arange" in str(result)


def test_functions_that_kernels_call_are_parsed_once() -> None:
    """Kernels are not kept: a process compiles thousands of them."""
    code = """
from gradsplit.compile_core.lowering.triton_kernels import quick_front_end, triton_compiler
triton_compiler._prepare()
triton_compiler._warm_up()
before = quick_front_end._parsed_text.cache_info().currsize
triton_compiler._warm_up()
after = quick_front_end._parsed_text.cache_info()
assert before == after.currsize > 0 and after.hits >= before, after
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", ["floor", "ceil"])
def test_what_is_one_instruction_needs_no_library(name: str, tmp_path: Path) -> None:
    """Libdevice takes numbers below the least normal one for 0, and LLVM reads it in full for each kernel."""
    _, case = OPERATIONS[f"{name}_float32"]
    text = compile_triton_for(generate_triton(*case), SM_90, tmp_path).asm["ptx"]
    assert ("cvt.rmi.f32.f32" if name == "floor" else "cvt.rpi.f32.f32") in text
    assert ".ftz" not in text
