"""Reports as a browser shows them; pictures stay in ``out/screenshots``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest

from gradsplit import report
from tests.observe.browser import take_screenshot
from tests.observe.test_report import TRAINING
from tests.start_ranks import start_ranks

# A graph of a thousand nodes, a graph break and a recompilation.
_DEEP = """
import torch, gradsplit

def deep(x, flag):
    for k in range(500):
        x = (x * 0.999).tanh() if k % 7 else x.cumsum(0) + 0.01
    gradsplit.graph_break()
    return x.sum() if flag else x.mean()

compiled = gradsplit.compile(deep)
for flag in (True, False):
    for _ in range(10):
        compiled(torch.randn(8, 8, requires_grad=True), flag).backward()
"""
pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(300)]


def _page(folder: Path, program: str, processes: int) -> Path:
    (folder / "train.py").write_text(program)
    run = start_ranks([str(folder / "train.py")], 200, processes, GRADSPLIT_DEBUG=str(folder / "run"))
    assert run.returncode == 0, run.stderr
    return report.write_report(folder / "run")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _page(tmp_path_factory.mktemp("gpt"), TRAINING, 2)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _page(tmp_path_factory.mktemp("deep"), _DEEP, 1)


def _assert_drawn(picture: Path) -> None:
    pixels = matplotlib.image.imread(picture)
    is_dark = pixels[..., :3].mean(-1) < 0.5
    assert 0.001 < is_dark.mean() < 0.5, "no text on white"
    assert is_dark[200:].any(axis=1).mean() > 0.1, "nothing below the first lines"


@pytest.mark.parametrize("part", ["verdict", "graphs", "buckets", "differences"])
def test_each_part_of_a_gpt_on_two_ranks_is_drawn(two_ranks: Path, part: str):
    _assert_drawn(take_screenshot(two_ranks, f"gpt_on_two_ranks_{part}", part))


@pytest.mark.parametrize("part", ["graphs", "breaks", "recompilations"])
def test_each_part_of_a_graph_of_a_thousand_nodes_is_drawn(deep: Path, part: str):
    _assert_drawn(take_screenshot(deep, f"thousand_nodes_{part}", part))


def test_a_link_opens_what_it_leads_to(deep: Path):
    graph = json.loads((deep.parent / "report.json").read_text())["graphs"][0]
    assert len(graph["captured"]) > 900
    anchor = f"{graph['id']}-joint-{graph['joint'][-1]['name']}"
    assert f'id="{anchor}"' in deep.read_text()
    opened = matplotlib.image.imread(take_screenshot(deep, "thousand_nodes_link", anchor))
    yellow = (opened[..., 0] > 0.95) & (abs(opened[..., 1] - 0xF3 / 255) < 0.02) & (opened[..., 2] < 0.8)
    assert yellow.any(axis=1).sum() > 10, "the row that the link leads to is not marked in the picture"
