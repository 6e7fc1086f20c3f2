"""What all tests share: seeds, threads, the GPU marker and golden prints."""

import difflib
import gc
import os
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import gradsplit

GOLDEN_FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the prints that golden tests produce to tests/golden/ instead of comparing with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers and ranks share the cores, so each keeps to one thread; child processes inherit the setting.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Every stage checks what it hands on; ranks and other child processes inherit this too.
    os.environ.setdefault("GRADSPLIT_VERIFY", "1")
    # Hundreds of them import gradsplit, and compile its source each where none keeps what it has compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Pytest listens to loggers that do not propagate; to this one torch tells of each symbol it makes, with stacks.
    torch._logging._internal.trace_log.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported stays: Python looks for no garbage in it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # They take long, and one that comes last keeps a single worker busy.
    items.sort(key=lambda item: item.get_closest_marker("multi_process") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, and with nothing compiled: equal code shares its programs."""
    gradsplit.reset()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` fails unless ``text`` equals the file ``tests/golden/<name>``.

    ``pytest --update-golden`` writes the file instead; review the change as you would code.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden file {path}: run pytest --update-golden, review it and add it")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            difference = "\n".join(
                difflib.unified_diff(
                    expected.splitlines(), text.splitlines(), f"golden/{name}", "this run", lineterm=""
                )
            )
            pytest.fail(
                f"{difference}\n\nIf the change is meant: pytest --update-golden, then review the diff."
            )

    return compare
