"""``gradsplit`` is the one name that is ours: from a checkout, and in a wheel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

import gradsplit

ROOT = Path(__file__).parent.parent
FOLDERS = ("bucketing", "compile_core", "distributed", "launch")

TRAIN = """
import bucketing, compile_core, distributed, launch, sys

for module in bucketing, compile_core, distributed, launch:
    assert module.OWNER == "the program", module
assert "torch" not in sys.modules

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradsplit

assert gradsplit.__file__ == sys.argv[1] + "/gradsplit/__init__.py"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
compiled = gradsplit.compile(model, backend="aot_eager")
compiled(torch.ones(4, 3)).sum().backward()
assert torch.equal(model.module.weight.grad, torch.full((2, 3), 4.0))
assert gradsplit.distributed.inspect_ddp(compiled) is not None
assert gradsplit.bucketing.reducer_plan and gradsplit.explain and gradsplit.testing.CompileCounter
assert sys.modules["distributed"].OWNER == "the program" and "distributed.compile_ddp" not in sys.modules
assert "torch.distributed.pipelining" not in sys.modules  # it takes a second and more, and only pipelines need it
dist.destroy_process_group()
"""


def run_python(*arguments: object, path: list[Path]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if tuple(map(int, setuptools.__version__.split(".")[:2])) < (77, 1):
        pytest.skip("pyproject.toml asks for a newer setuptools")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*FOLDERS, "gradsplit"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = "import setuptools.build_meta, sys; setuptools.build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", program, str(built)], cwd=source, capture_output=True, text=True, check=True
    )
    return next(built.iterdir())


def test_a_wheel_holds_one_package_with_all_files(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in files} == {"gradsplit"}
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        # Pages are for readers of the source: a wheel holds what runs.
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    own = {path.name for path in (ROOT / "gradsplit").iterdir() if path.is_file()}
    assert {name.removeprefix("gradsplit/") for name in files} == expected | own
    assert {"__init__.py", "py.typed", "doctor.py"} <= own


def test_a_program_whose_files_have_these_names_trains_with_a_wheel(tmp_path: Path, wheel: Path) -> None:
    installed, beside = tmp_path / "installed", tmp_path / "beside"
    zipfile.ZipFile(wheel).extractall(installed)
    beside.mkdir()
    for name in FOLDERS:
        (beside / f"{name}.py").write_text('OWNER = "the program"\n')
    (beside / "train.py").write_text(TRAIN)
    run_python(beside / "train.py", installed, path=[installed])


def test_packages_of_these_names_that_come_after_a_checkout_are_the_ones_imported(tmp_path: Path) -> None:
    """As Dask's, which is a package and imports itself."""
    others = tmp_path / "others"
    for name in FOLDERS:
        (others / name).mkdir(parents=True)
        (others / name / "__init__.py").write_text(f"from {name}.part import OWNER\n")
        (others / name / "part.py").write_text('OWNER = "the program"\n')
    (tmp_path / "train.py").write_text(TRAIN)
    run_python(tmp_path / "train.py", ROOT, path=[ROOT, others])


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_found_under_a_bare_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT)])
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'") as raised:
        importlib.import_module(name)
    assert raised.value.name == name and name not in sys.modules


def test_the_import_is_quick_and_a_launcher_needs_no_torch() -> None:
    program = """
import gradsplit, gradsplit.launch.cli, sys
assert gradsplit.__version__ and "torch" not in sys.modules
del sys.modules["gradsplit"]
import time, torch
start = time.perf_counter()
import gradsplit
print(time.perf_counter() - start)
"""
    assert float(run_python("-c", program, path=[ROOT])) < 0.3


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'gradsplit' has no attribute 'compil'"):
        gradsplit.compil  # noqa: B018
    assert {"compile", "explain", "distributed", "bucketing"} <= set(dir(gradsplit))
