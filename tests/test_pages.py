"""What README and the pages say of files, functions and names is so, and the first example runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit

ROOT = Path(__file__).parent.parent
FOLDERS = ("bucketing", "compile_core", "distributed", "launch")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Of what stands in backticks, that which names a file of ours.
FILE = re.compile(r"`([\w/]+\.(?:py|cpp))`")
EXAMPLE_FILE = "train.py"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose_of(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made for links."""
    titles = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    after = page.read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    lines = [line for line in after.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def reading_path() -> list[tuple[Path, list[str]]]:
    """The files of the path for a first reading, each with the functions that are to be read."""
    page = ROOT / "docs" / "architecture.md"
    found = []
    for _, file, functions, _ in rows_of(page, "## A path for a first reading"):
        (link,) = LINK.findall(file)
        found.append(((page.parent / link).resolve(), re.findall(r"`([\w.]+)`", functions)))
    return found


def qualified_names(file: Path) -> set[str]:
    """Of the functions and methods that a file defines."""
    if file.suffix == ".cpp":
        return set(
            re.findall(r"^\s*[\w:*]+ (\w+)\([^;]*\) \{$", file.read_text(encoding="utf-8"), re.MULTILINE)
        )
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            names |= {f"{kind.name}.{node.name}" for node in kind.body if isinstance(node, ast.FunctionDef)}
    return names


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.multi_process
def test_the_readmes_example_runs_as_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(rf"^python (.* {EXAMPLE_FILE})$", text, re.MULTILINE)
    (tmp_path / EXAMPLE_FILE).write_text(program)
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    printed = sorted(re.findall(r"rank (\d): loss ([\d.]+)", done.stdout))
    assert [rank for rank, _ in printed] == ["0", "1"]
    assert all(float(loss) < 2.0 for _, loss in printed)  # of ten classes, guessing has 2.3


def test_the_readmes_names_are_there() -> None:
    cells = rows_of(ROOT / "README.md", "## What it gives")
    names = [name for first, _ in cells for name in re.findall(r"`([\w.]+)", first)]
    assert len(names) > 20
    for name in names:
        found = gradsplit
        for part in name.split("."):
            found = getattr(found, part)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose_of(page)):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not heading or heading in headings_of(target), link


@each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Beside the page, in a folder around it, or anywhere in the folder that the page is about."""
    here = page.parent if page.parent.name != "docs" else ROOT
    around = [folder for folder in (here, *here.parents) if folder.is_relative_to(ROOT)]
    for name in FILE.findall(prose_of(page)):
        if name in (EXAMPLE_FILE, "distributed.py"):
            continue
        roots = [*around, ROOT / "compile_core"]
        assert any((folder / name).is_file() for folder in roots) or any(
            file.name == name for folder in FOLDERS for file in (ROOT / folder).rglob(Path(name).name)
        ), name


def test_the_reading_path_is_short_and_its_functions_exist() -> None:
    path = reading_path()
    assert 2 < len(path) <= 12
    assert len({file for file, _ in path}) == len(path)
    for file, functions in path:
        assert functions, file
        assert set(functions) <= qualified_names(file), file


def test_a_step_takes_the_reading_path() -> None:
    """From ``compile`` to the region interpreter and to the all-reduce, all the path's functions run, in order."""
    path = [(str(file), functions) for file, functions in reading_path() if file.suffix == ".py"]
    wanted = {(file, name) for file, functions in path for name in functions}
    names = {name for _, name in wanted}
    called: dict[tuple[str, str], None] = {}

    def profile(frame, event, argument) -> None:
        if event == "call":
            code = frame.f_code
            if (
                code.co_qualname in names
                and (found := (os.path.realpath(code.co_filename), code.co_qualname)) in wanted
            ):
                called.setdefault(found)

    gradsplit.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sys.setprofile(profile)
        model = gradsplit.compile(DistributedDataParallel(torch.nn.Linear(3, 2)))
        model(torch.ones(4, 3)).sum().backward()
    finally:
        sys.setprofile(None)
        dist.destroy_process_group()
    assert set(called) == wanted
    files = list(dict.fromkeys(file for file, _ in called))
    assert files == [file for file, _ in path]


def test_the_glossary_is_short_and_names_what_there_is() -> None:
    page = ROOT / "docs" / "glossary.md"
    terms = rows_of(page, "# Glossary")
    assert 0 < len(terms) <= 40
    assert [term for term, _ in terms] == sorted(term for term, _ in terms)
    source = "\n".join(
        file.read_text(encoding="utf-8") for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    )
    defined = set(re.findall(r"^ *(?:class|def) (\w+)|^    (\w+): |^(\w+)(?::.*)? = ", source, re.MULTILINE))
    known = {name for names in defined for name in names if name}
    for _, meaning in terms:
        for name in re.findall(r"`([A-Za-z_.]+)`", meaning):
            if not name.endswith(".py") and not name.startswith("torch."):
                assert set(name.split(".")) <= known, name
