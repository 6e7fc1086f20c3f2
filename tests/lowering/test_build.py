"""Building C++ kernels: sharing, caching, failing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL
from gradsplit.compile_core.lowering.build import build, start_build
from gradsplit.compile_core.lowering.cpp_kernels import build_cpp, cpp_machine
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import generate_cpp
from gradsplit.compile_core.toolchain import cpp_compiler
from tests.lowering.codegen_nests import inputs_for, residual_add, softmax

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(build_cpp, "_loaded", {})
    monkeypatch.setattr(build_cpp, "usable_processors", lambda: 1)


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    original = build_cpp._compile

    def counted(source: str, *arguments) -> None:
        compiled.append(source)
        original(source, *arguments)

    monkeypatch.setattr(build_cpp, "_compile", counted)
    return compiled


def test_kernels_of_the_same_text_are_one(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    first = generate_cpp(*residual_add((7, 11)))
    functions = build([first, replace(first, name="twin"), generate_cpp(*softmax(3, 7))], tmp_path)
    assert functions["residual_add"] is functions["twin"]
    assert len(compiled) == 1
    assert compiled[0].count("KernelDefinition gs_") == 2
    build([replace(first, name="triplet")], tmp_path)
    assert len(compiled) == 1


def test_a_new_process_finds_what_was_built(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    sources = [generate_cpp(*residual_add((7, 11))), generate_cpp(*softmax(3, 7))]
    build(sources, tmp_path)
    build_cpp._loaded.clear()
    functions = build(list(reversed(sources)), tmp_path)
    assert len(compiled) == 1
    storages = inputs_for(residual_add((7, 11)))
    functions["residual_add"](*(storages[name] for name in sources[0].buffers))
    assert torch.equal(storages["z"], storages["x"] + storages["y"])


def test_a_damaged_object_is_rebuilt_and_not_loaded(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = generate_cpp(*softmax(3, 5))
    # In a process of its own: rewriting an object that this one has mapped would crash it.
    script = (
        "import sys; from pathlib import Path; from tests.lowering.codegen_nests import softmax\n"
        "from gradsplit.compile_core.lowering.build import build\n"
        "from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import generate_cpp\n"
        "build([generate_cpp(*softmax(3, 5))], Path(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=True,
    )
    built, *_ = tmp_path.glob("entries/*/kernels.so")  # one file with several names
    built.write_bytes(built.read_bytes()[:-100])
    compiled = count_compilations(monkeypatch)
    storages = inputs_for(softmax(3, 5))
    build([source], tmp_path)[source.name](*(storages[name] for name in source.buffers))
    assert len(compiled) == 1
    torch.testing.assert_close(storages["y"].view(3, 5), storages["x"].view(3, 5).softmax(1))


def test_a_program_that_changed_in_one_place_is_compiled_in_one_place(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    unchanged = [generate_cpp(*residual_add((7, size))) for size in (11, 13, 17)]
    build([replace(source, name=f"first_{k}") for k, source in enumerate(unchanged)], tmp_path)
    build_cpp._loaded.clear()
    changed = replace(generate_cpp(*residual_add((7, 19))), name="changed")
    build([replace(source, name=f"again_{k}") for k, source in enumerate(unchanged)] + [changed], tmp_path)
    assert [source.count("KernelDefinition gs_") for source in compiled] == [3, 1]


def test_kernels_are_shared_among_as_many_compilers_as_there_are_processors(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cpp, "usable_processors", lambda: 2)
    compiled = count_compilations(monkeypatch)
    sources = [replace(generate_cpp(*residual_add((2, n))), name=f"add_{n}") for n in range(3, 9)]
    start_build(sources, tmp_path)
    functions = start_build(sources, tmp_path)()  # a second program that needs what is being compiled
    assert sorted(source.count("KernelDefinition gs_") for source in compiled) == [3, 3]
    assert len(functions) == 6


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_come_one_after_the_other_build_each_kernel_once(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cpp, "usable_processors", lambda: 2)
    compile_unit = build_cpp._compile

    def slow(*arguments) -> None:
        time.sleep(0.4)
        compile_unit(*arguments)

    monkeypatch.setattr(build_cpp, "_compile", slow)
    nests = [residual_add((7, n)) for n in (2, 3, 5)] + [softmax(n, 7) for n in (2, 3)]
    sources = [replace(generate_cpp(*nest), name=str(k)) for k, nest in enumerate(nests)]
    children = []
    for first in (
        sources[:1],
        sources,
        sources[2:],
    ):  # what is there already makes other units of what is not
        child = os.fork()
        if child == 0:
            status = 1
            try:
                build(first, tmp_path)
                status = 0 if len(build(sources, tmp_path)) == len(sources) else 2
            finally:
                os._exit(status)
        children.append(child)
        time.sleep(0.3)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    built = "".join(path.read_text() for path in tmp_path.glob("entries/*/kernels.cpp"))
    assert built.count("KernelDefinition gs_") == len(sources)
    assert not list(tmp_path.glob("locks/claim-*"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_waits_for_a_process_that_dies_builds_itself(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(build_cpp, "_compile", lambda *_: time.sleep(60))
        build([generate_cpp(*softmax(3, 7))], tmp_path)
        os._exit(0)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("building-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()
    assert len(build([generate_cpp(*softmax(3, 7))], tmp_path)) == 1
    os.waitpid(child, 0)


def test_a_kernel_that_failed_is_tried_again(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = generate_cpp(*residual_add((2, 23)))
    original = build_cpp._compile
    monkeypatch.setattr(build_cpp, "_compile", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build([source], tmp_path)
    monkeypatch.setattr(build_cpp, "_compile", original)
    assert build([source], tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_its_parents_threads(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = generate_cpp(*residual_add((2, 29)))
    original, is_parent = build_cpp._compile, threading.Event()

    def waits_for_the_child(*arguments) -> None:
        assert is_parent.wait(60)
        original(*arguments)

    monkeypatch.setattr(build_cpp, "_compile", waits_for_the_child)
    wait = start_build([source], tmp_path / "parent")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(build_cpp, "_compile", original)
        signal.alarm(60)
        os._exit(0 if source.name in build([source], tmp_path / "child") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    is_parent.set()
    assert source.name in wait()


def test_a_failed_compilation_shows_the_compiler_and_keeps_the_source(
    tmp_path: Path, nothing_loaded: None
) -> None:
    source = generate_cpp(*residual_add((2, 2)))
    broken = replace(source, text=source.text.replace("bad = 0", "bad = nonsense"))
    with pytest.raises(CompileError, match=r"(?s)nonsense.*The source is kept in (.*\.cpp)") as raised:
        build([broken], tmp_path)
    kept = Path(str(raised.value).rsplit("kept in ", 1)[1].rstrip("."))
    assert "nonsense" in kept.read_text()


def test_a_compilation_that_never_ends_is_done_again_with_a_plainer_optimizer(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a minimum of three numbers whose position is compared with zero, and g++ 13.3."""
    source = generate_cpp(*residual_add((2, 3)))
    endless = tmp_path / "endless"
    ends = '*-O3*-O1* | *-shared*) shift; exec "$@";;'
    endless.write_text(f'#!/bin/sh\ncase "$*" in {ends} esac\nwhile :; do :; done\n')
    endless.chmod(0o755)
    monkeypatch.setattr(cpp_compiler, "_MOST_PROCESSOR_SECONDS", 1)
    found = cpp_compiler.compiler()
    monkeypatch.setattr(cpp_compiler, "compiler", lambda: (str(endless), "--", *found))
    assert source.name in build([source], tmp_path / "cache")
    (warning,) = caplog.records
    assert "compiled with -O1, since" in warning.message and "The source is kept in" in warning.message


def test_no_compiler_is_explained(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    cpp_compiler.compiler.cache_clear()
    build_cpp._context_key.cache_clear()
    cpp_machine.compiler_version.cache_clear()
    try:
        with pytest.raises(CompileError, match="none of g\\+\\+, c\\+\\+, clang\\+\\+ is on PATH"):
            build([generate_cpp(*residual_add((2, 5)))], tmp_path)
    finally:
        cpp_compiler.compiler.cache_clear()


def test_what_is_kept_needs_no_compiler_and_cxx_chooses_one(
    tmp_path: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = generate_cpp(*residual_add((2, 7)))
    used = tmp_path / "used"
    (tmp_path / "wrapper").write_text(f'#!/bin/sh\necho "$2" >> {used}; shift; exec "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)

    def start_anew() -> None:
        for found in (cpp_compiler.compiler, cpp_machine.compiler_version, build_cpp._context_key):
            found.cache_clear()
        monkeypatch.setattr(build_cpp, "_loaded", {})

    try:
        monkeypatch.setenv("CXX", f"{tmp_path}/wrapper -- {cpp_compiler.compiler()[0]} -DCHOSEN")
        start_anew()
        build([source], tmp_path / "cache")
        assert used.read_text().split()
        monkeypatch.setenv("PATH", str(tmp_path))
        (tmp_path / "wrapper").unlink()
        start_anew()
        assert build([source], tmp_path / "cache")
        with pytest.raises(CompileError, match="there is no program"):
            build([generate_cpp(*residual_add((2, 9)))], tmp_path / "cache")
    finally:
        monkeypatch.undo()
        start_anew()


def test_objects_use_the_openmp_runtime_of_torch(tmp_path: Path, nothing_loaded: None) -> None:
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}

    before = mapped()
    assert cpp_machine.openmp_runtime() in before
    build([generate_cpp(*residual_add((3, 5)))], tmp_path)
    assert mapped() == before


def test_names_do_not_reach_the_text() -> None:
    source = generate_cpp(*residual_add((2, 2)))
    assert "residual_add" not in source.text
    assert KERNEL_SYMBOL in source.text
